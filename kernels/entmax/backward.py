"""Gradients of entmax of rows in Triton, from the probabilities alone; the twin of `gradient`.

A row that fits in registers is read once, as is its upstream gradient, and written once. Longer
rows take two passes: the sums that give delta, then d scores and d alpha.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import cdiv, kernel_input
from sparseformer.kernels.entmax.device import TINY, alpha_term, slopes_from
from sparseformer.kernels.entmax.forward import MAX_TILE, tile_shape
from sparseformer.kernels.entmax.long_rows import MAX_BLOCK, long_launch
from sparseformer.kernels.entmax.row_input import (
    RowAlpha,
    load_eps,
    load_tile,
    precision,
    split_alpha,
)


@triton.jit
def _gradient_tile_kernel(
    probs_ptr,
    grad_ptr,
    alpha_ptr,
    d_scores_ptr,
    d_alpha_ptr,
    stride_grad_row,
    stride_grad_col,
    stride_alpha,
    num_rows,
    length,
    eps,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_N).to(tl.int64)
    present = (rows < num_rows)[:, None]
    mask = present & (cols < length)[None, :]
    offsets = rows[:, None] * length + cols[None, :]
    probs = tl.load(probs_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
    grad_offsets = rows[:, None] * stride_grad_row + cols[None, :] * stride_grad_col
    grad = tl.load(grad_ptr + grad_offsets, mask=mask, other=0.0).to(COMPUTE)
    eps = load_eps(alpha_ptr, rows[:, None] * stride_alpha, present, eps, EPS, COMPUTE, ROUNDING)
    slopes = slopes_from(probs, eps, EPS)
    # probs * 0 hands a NaN row on: u is 0 where p isn't above 0.
    weighted = tl.sum(slopes * grad + probs * 0.0, 1)[:, None]
    centred = grad - weighted / tl.maximum(tl.sum(slopes, 1)[:, None], TINY)
    if d_alpha_ptr is not None:
        d_alpha = tl.sum(alpha_term(probs, slopes, eps, EPS) * centred, 1)
        tl.store(d_alpha_ptr + rows, d_alpha, mask=rows < num_rows)
    if d_scores_ptr is not None:
        d_scores = slopes * centred
        if EPS is None and tl.max(eps) > 1.0:
            d_scores = tl.where(eps > 1.0, _balance(d_scores, slopes, cols), d_scores)
        tl.store(d_scores_ptr + offsets, d_scores.to(d_scores_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _balance(d_scores, slopes, cols):
    """Recompute the entry with the largest slope from the others; see `gradient`."""
    largest = tl.argmax(slopes, 1)[:, None] == cols[None, :]
    others = tl.sum(tl.where(largest, 0.0, d_scores), 1)[:, None]
    return tl.where(largest, -others, d_scores)


@triton.jit
def _gradient_long_kernel(
    probs_ptr,
    grad_ptr,
    alpha_ptr,
    d_scores_ptr,
    d_alpha_ptr,
    stride_grad_row,
    stride_grad_col,
    stride_alpha,
    length,
    eps,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += row * length
    grad_ptr += row * stride_grad_row
    one = row + tl.arange(0, 1)
    eps = load_eps(alpha_ptr, one * stride_alpha, one == row, eps, EPS, COMPUTE, ROUNDING)
    eps = tl.sum(eps, 0)
    delta, steepest = _delta(
        probs_ptr, grad_ptr, stride_grad_col, length, eps, EPS, COMPUTE, BLOCK_N
    )
    d_alpha = tl.zeros([BLOCK_N], COMPUTE)
    others = tl.zeros([BLOCK_N], COMPUTE)
    for start in range(0, length, BLOCK_N):
        probs = load_tile(probs_ptr, start, length, 1, 0.0, COMPUTE, BLOCK_N)
        grad = load_tile(grad_ptr, start, length, stride_grad_col, 0.0, COMPUTE, BLOCK_N)
        slopes = slopes_from(probs, eps, EPS)
        centred = grad - delta
        if d_alpha_ptr is not None:
            d_alpha += alpha_term(probs, slopes, eps, EPS) * centred
        if d_scores_ptr is not None:
            cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
            d_scores = tl.where(cols == steepest, 0.0, slopes * centred)
            others += d_scores
            mask = (cols < length) & (cols != steepest)
            d_scores = d_scores.to(d_scores_ptr.dtype.element_ty)
            tl.store(d_scores_ptr + row * length + cols, d_scores, mask=mask)
    if d_alpha_ptr is not None:
        tl.store(d_alpha_ptr + row, tl.sum(d_alpha, 0))
    if d_scores_ptr is not None and EPS is None:
        # As `_balance`.
        last = (-tl.sum(others, 0)).to(d_scores_ptr.dtype.element_ty)
        tl.store(d_scores_ptr + row * length + steepest, last, mask=steepest >= 0)


@triton.jit
def _delta(
    probs_ptr,
    grad_ptr,
    stride_grad,
    length,
    eps,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return delta, and the column with the largest slope above alpha = 2, else -1."""
    total = tl.zeros([BLOCK_N], COMPUTE)
    weighted = tl.zeros([BLOCK_N], COMPUTE)
    largest = tl.full([BLOCK_N], -1.0, COMPUTE)
    where = tl.full([BLOCK_N], 0, tl.int64)
    for start in range(0, length, BLOCK_N):
        probs = load_tile(probs_ptr, start, length, 1, 0.0, COMPUTE, BLOCK_N)
        grad = load_tile(grad_ptr, start, length, stride_grad, 0.0, COMPUTE, BLOCK_N)
        slopes = slopes_from(probs, eps, EPS)
        total += slopes
        weighted += slopes * grad + probs * 0.0
        if EPS is None:
            cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
            where = tl.where(slopes > largest, cols, where)
            largest = tl.maximum(largest, slopes)
    delta = tl.sum(weighted, 0) / tl.maximum(tl.sum(total, 0), TINY)
    steepest = tl.min(tl.where(largest == tl.max(largest, 0), where, length), 0)
    return delta, tl.where(eps > 1.0, steepest, -1)


def entmax_backward(
    probs: Tensor, grad: Tensor, alpha: float | Tensor, want_scores: bool, want_alpha: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return d scores = u (dP - delta) and d alpha = sum p g (dP - delta) of every row.

    Args:
        probs: p, [R, n], contiguous, as `entmax_forward` returned it.
        grad: dP, [R, n], any strides.
        alpha: as `entmax_forward` took it.
        want_scores: whether to compute d scores.
        want_alpha: whether to compute d alpha.

    Returns:
        d scores, [R, n] in the dtype of probs, and d alpha, [R], fp32 (float64 for float64); None
        where it isn't wanted. 0 for a row of zeros.
    """
    given, upstream = kernel_input(probs), kernel_input(grad)
    computed = torch.float64 if given.dtype == torch.float64 else torch.float32
    d_scores = torch.empty_like(given) if want_scores else None
    d_alpha = given.new_zeros(given.size(0), dtype=computed) if want_alpha else None
    if given.numel() and (want_scores or want_alpha):
        launch_gradients(given, upstream, split_alpha(alpha, given), d_scores, d_alpha)
    return None if d_scores is None else d_scores.to(probs.dtype), d_alpha


def launch_gradients(
    probs: Tensor,
    grad: Tensor,
    alpha: RowAlpha,
    d_scores: Tensor | None,
    d_alpha: Tensor | None,
    max_tile: int = MAX_TILE,
) -> None:
    """Fill d_scores and d_alpha; rows longer than max_tile are streamed, as in `forward`."""
    num_rows, length = probs.shape
    block_rows, block_n, launch = tile_shape(length)
    tensors = {
        "probs_ptr": probs,
        "grad_ptr": grad,
        "alpha_ptr": alpha.tensor,
        "d_scores_ptr": d_scores,
        "d_alpha_ptr": d_alpha,
        "stride_grad_row": grad.stride(0),
        "stride_grad_col": grad.stride(1),
        "stride_alpha": alpha.stride,
    }
    numbers = {"length": length, "eps": alpha.eps, "EPS": alpha.fixed, **precision(probs.dtype)}
    if length > max_tile:
        block_n = min(max_tile, MAX_BLOCK)
        options = long_launch(block_n).options()
        _gradient_long_kernel[(num_rows,)](**tensors, **numbers, BLOCK_N=block_n, **options)
        return
    _gradient_tile_kernel[(cdiv(num_rows, block_rows),)](
        **tensors,
        num_rows=num_rows,
        **numbers,
        BLOCK_ROWS=block_rows,
        BLOCK_N=block_n,
        **launch.options(),
    )
