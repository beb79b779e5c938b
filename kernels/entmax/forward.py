"""Entmax of rows in Triton: rows that fit in registers here, longer ones in `long_rows`.

A row that fits is read once, solved by Newton's method in registers, and written once; rows up to
1024 long share a program. The number of steps of a row depends on that row alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import (
    Launch,
    RoomyLaunch,
    cdiv,
    kernel_input,
    next_power_of_2,
)
from sparseformer.kernels.entmax.device import MAX_STEPS, expm1, newton_step, powers
from sparseformer.kernels.entmax.long_rows import launch_long_rows
from sparseformer.kernels.entmax.row_input import (
    RowAlpha,
    load_eps,
    precision,
    split_alpha,
)
from sparseformer.kernels.entmax.steep_kernel import steep_probabilities

# Longer rows don't fit in registers.
MAX_TILE = 4096


@triton.jit
def _entmax_tile_kernel(
    scores_ptr,
    alpha_ptr,
    probs_ptr,
    stride_scores_row,
    stride_scores_col,
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
    mask = (rows < num_rows)[:, None] & (cols < length)[None, :]
    offsets = rows[:, None] * stride_scores_row + cols[None, :] * stride_scores_col
    scores = tl.load(scores_ptr + offsets, mask=mask, other=float("-inf")).to(COMPUTE)
    maximum = tl.max(scores, 1)[:, None]
    y = scores - tl.where(maximum == float("-inf"), 0.0, maximum)  # [BLOCK_ROWS, BLOCK_N]
    present = (rows < num_rows)[:, None]
    eps = load_eps(alpha_ptr, rows[:, None] * stride_alpha, present, eps, EPS, COMPUTE, ROUNDING)
    # All y are at most 0, so the sum is NaN exactly where the row or its alpha holds NaN or inf.
    total = tl.sum(tl.where(mask, y, 0.0), 1)[:, None] + eps * 0.0
    if EPS == 0.0:
        probs, slopes = powers(y, eps, EPS)
        mass = tl.sum(probs, 1)[:, None]
        probs = probs / tl.where(mass > 0.0, mass, 1.0)
    else:
        smooth_eps = tl.minimum(eps, 1.0)
        t = _lower_bound(total, length, smooth_eps, EPS)
        t = _climb(y, t, smooth_eps, EPS, ROUNDING)
        probs, slopes = powers(y - t, smooth_eps, EPS)
        probs = _fold_last_step(probs, slopes)
        if EPS is None and tl.max(eps) > 1.0:
            steep = steep_probabilities(y, tl.maximum(eps, 1.0), COMPUTE)
            probs = tl.where(eps > 1.0, steep, probs)
    probs = tl.where(total == total, probs, float("nan"))
    offsets = rows[:, None] * length + cols[None, :]
    tl.store(probs_ptr + offsets, probs.to(probs_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lower_bound(total, length, eps, EPS: tl.constexpr):
    """Bound t from below: by max(s) = 0, and by the t of n scores that all equal the mean."""
    count = tl.zeros_like(total) + length
    if EPS == 0.5:
        spread = 2.0 - 2.0 / tl.sqrt(count)
    elif EPS == 1.0:
        spread = 1.0 - 1.0 / count
    else:
        spread = -expm1(-eps * tl.log(count)) / eps
    # A mean of -inf, and NaN, leave the bound at 0.
    bound = total / count + spread
    return tl.where(bound > 0.0, bound, 0.0)


@triton.jit
def _climb(y, t, eps, EPS: tl.constexpr, ROUNDING: tl.constexpr):
    """Take Newton steps until one step of the final evaluation is left; see `solver`."""
    kinked: tl.constexpr = 8.0 * ROUNDING
    smooth: tl.constexpr = 0.3 * ROUNDING**0.25
    if EPS is None:
        tolerance = tl.where(eps <= 0.5, smooth, kinked)
    elif EPS <= 0.5:
        tolerance = smooth
    else:
        tolerance = kinked
    active = t == t
    steps = 0
    going = 1
    while going > 0:
        probs, slopes = powers(y - t, eps, EPS)
        step = newton_step(tl.sum(probs, 1)[:, None], tl.sum(slopes, 1)[:, None], eps, EPS)
        # A row that has arrived stays, so that its result doesn't depend on its neighbours.
        t = tl.where(active, t + step, t)
        active = active & (tl.abs(step) > tolerance)
        steps += 1
        going = tl.where(steps < MAX_STEPS, tl.max(active.to(tl.int32)), 0)
    return t


@triton.jit
def _fold_last_step(probs, slopes):
    """Move p along -u until it sums to 1: rounding of t costs no mass on long flat rows."""
    slope = tl.sum(slopes, 1)[:, None]
    missing = tl.sum(probs, 1)[:, None] - 1.0
    step = tl.where(slope > 0.0, missing / tl.where(slope > 0.0, slope, 1.0), 0.0)
    return tl.maximum(probs - slopes * step, 0.0)


def entmax_forward(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """Map every row to p = entmax(row), computed in fp32.

    Args:
        scores: [R, n], any strides, fp32, fp16 or bf16 (float64 under the interpreter only). -inf
            excludes an entry; a row that holds NaN or +inf becomes NaN.
        alpha: 1 or more; a float, or a tensor of shape [1] or [R] on the device of scores.

    Returns:
        [R, n], contiguous, in the dtype of scores; zeros for a row without a finite score.
    """
    given = kernel_input(scores)
    probs = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    if probs.numel():
        launch_rows(given, split_alpha(alpha, given), probs)
    return probs.to(scores.dtype)


def launch_rows(scores: Tensor, alpha: RowAlpha, probs: Tensor, max_tile: int = MAX_TILE) -> None:
    """Fill probs; rows longer than max_tile are streamed in blocks of at most that length."""
    num_rows, length = scores.shape
    if length > max_tile:
        return launch_long_rows(scores, alpha, probs, max_tile)
    block_rows, block_n, launch = tile_shape(length)
    _entmax_tile_kernel[(cdiv(num_rows, block_rows),)](
        scores_ptr=scores,
        alpha_ptr=alpha.tensor,
        probs_ptr=probs,
        stride_scores_row=scores.stride(0),
        stride_scores_col=scores.stride(1),
        stride_alpha=alpha.stride,
        num_rows=num_rows,
        length=length,
        eps=alpha.eps,
        EPS=alpha.fixed,
        **precision(scores.dtype),
        BLOCK_ROWS=block_rows,
        BLOCK_N=block_n,
        **launch.options(),
    )
    return None


def tile_shape(length: int) -> tuple[int, int, Launch]:
    """Return rows and columns of a program, and its launch: 8 to 16 scores per thread."""
    block_n = max(next_power_of_2(length), 8)
    launch = RoomyLaunch(num_warps=min(max(block_n // 512, 4), 32))
    return max(1024 // block_n, 1), block_n, launch
