"""Entmax in Triton of rows that don't fit in registers, one program a row.

The first pass keeps the two largest scores of every lane. Newton's method on these gives a lower
bound of t, which is t itself if no lane's second score is in the support: then no dropped one is
either, and a second pass writes p, with the last step folded in. Otherwise each further Newton
step reads the row once more, from the cache. Softmax takes two passes. Above alpha = 2, bisection
reads the row about 64 times.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, RoomyLaunch
from sparseformer.kernels.entmax.device import LOG2_E, MAX_STEPS, newton_step, powers
from sparseformer.kernels.entmax.long_steep import steep_row
from sparseformer.kernels.entmax.row_input import (
    RowAlpha,
    load_eps,
    load_tile,
    precision,
    store_tile,
)

MAX_BLOCK = 2048


@triton.jit
def _entmax_long_kernel(
    scores_ptr,
    alpha_ptr,
    probs_ptr,
    stride_scores_row,
    stride_scores_col,
    stride_alpha,
    length,
    eps,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * stride_scores_row
    out_ptr = probs_ptr + row * length
    stride = stride_scores_col
    if EPS == 0.0:
        _softmax_row(row_ptr, out_ptr, length, stride, COMPUTE, BLOCK_N)
    else:
        one = row + tl.arange(0, 1)
        eps = load_eps(alpha_ptr, one * stride_alpha, one == row, eps, EPS, COMPUTE, ROUNDING)
        eps = tl.sum(eps, 0)
        if EPS is not None:
            _smooth_row(row_ptr, out_ptr, eps, length, stride, EPS, COMPUTE, ROUNDING, BLOCK_N)
        elif eps > 1.0:
            steep_row(row_ptr, out_ptr, eps, length, stride, COMPUTE, BLOCK_N)
        else:
            _smooth_row(row_ptr, out_ptr, eps, length, stride, EPS, COMPUTE, ROUNDING, BLOCK_N)


@triton.jit
def _softmax_row(row_ptr, out_ptr, length, stride, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr):
    maximum = tl.full([BLOCK_N], float("-inf"), COMPUTE)
    mass = tl.zeros([BLOCK_N], COMPUTE)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        larger = tl.maximum(maximum, scores)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp2((maximum - shift) * LOG2_E) + tl.exp2((scores - shift) * LOG2_E)
        maximum = larger
    largest = tl.max(maximum, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(mass * tl.exp2((maximum - largest) * LOG2_E), 0)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        probs = tl.exp2((scores - largest) * LOG2_E) / total
        store_tile(out_ptr, start, length, probs, BLOCK_N)


@triton.jit
def _smooth_row(
    row_ptr,
    out_ptr,
    eps,
    length,
    stride,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    best, second, odd = _two_best(row_ptr, length, stride, COMPUTE, BLOCK_N)
    maximum = tl.max(best, 0)
    # Added to p, it turns a row that holds NaN or inf into NaN.
    taint = tl.where(odd | (maximum == float("inf")) | (eps != eps), float("nan"), 0.0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    best, second = best - maximum, second - maximum
    t, mass, slope = _threshold(
        best, second, row_ptr, maximum, eps, length, stride, EPS, COMPUTE, ROUNDING, BLOCK_N
    )
    step = tl.where(slope > 0.0, (mass - 1.0) / tl.where(slope > 0.0, slope, 1.0), 0.0)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        probs, slopes = powers(scores - maximum - t, eps, EPS)
        probs = tl.maximum(probs - slopes * step, 0.0) + taint
        store_tile(out_ptr, start, length, probs, BLOCK_N)


@triton.jit
def _two_best(row_ptr, length, stride, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the two largest scores of every lane, and whether the row holds a NaN."""
    best = tl.full([BLOCK_N], float("-inf"), COMPUTE)
    second = best
    odd = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        odd = odd | (scores != scores).to(tl.int32)
        second = tl.maximum(second, tl.minimum(best, scores))
        best = tl.maximum(best, scores)
    return best, second, tl.max(odd, 0) > 0


@triton.jit
def _threshold(
    best,
    second,
    row_ptr,
    maximum,
    eps,
    length,
    stride,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return t of the scores minus their maximum, nearly, and the row's sums of p and u there."""
    t = maximum * 0.0
    mass, slope = t, t
    kept = 1
    steps = 0
    going = 1
    while going > 0:
        if kept > 0:
            mass, slope = _kept_sums(best, second, t, eps, EPS)
        else:
            mass, slope = _row_sums(row_ptr, maximum, t, eps, length, stride, EPS, COMPUTE, BLOCK_N)
        step = newton_step(mass, slope, eps, EPS)
        steps += 1
        moving = _is_far(mass, step, eps, ROUNDING) & (steps < MAX_STEPS)
        t = tl.where(moving, t + step, t)
        # Arrived on the kept scores: go on with the whole row if a lane may hide more of it.
        hiding, _ = powers(tl.max(second, 0) - t, eps, EPS)
        going = (moving | ((kept > 0) & (hiding > 0.0))).to(tl.int32)
        kept = tl.where(moving, kept, 0)
    return t, mass, slope


@triton.jit
def _is_far(mass, step, eps, ROUNDING: tl.constexpr):
    """Say whether squares of what is left count; above alpha = 1.5, keys that leave bend p."""
    near = tl.where(eps <= 0.5, 0.3 * ROUNDING**0.5, 8.0 * ROUNDING)
    return (tl.abs(mass - 1.0) > near) & (tl.abs(step) > 8.0 * ROUNDING)


@triton.jit
def _kept_sums(best, second, t, eps, EPS: tl.constexpr):
    probs, slopes = powers(best - t, eps, EPS)
    second_probs, second_slopes = powers(second - t, eps, EPS)
    return tl.sum(probs + second_probs, 0), tl.sum(slopes + second_slopes, 0)


@triton.jit
def _row_sums(
    row_ptr,
    maximum,
    t,
    eps,
    length,
    stride,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    mass = tl.zeros([BLOCK_N], COMPUTE)
    slope = mass
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        probs, slopes = powers(scores - maximum - t, eps, EPS)
        mass += probs
        slope += slopes
    return tl.sum(mass, 0), tl.sum(slope, 0)


def launch_long_rows(scores: Tensor, alpha: RowAlpha, probs: Tensor, max_block: int) -> None:
    """Fill probs; see `forward.launch_rows`."""
    num_rows, length = scores.shape
    block_n = min(max_block, MAX_BLOCK)
    _entmax_long_kernel[(num_rows,)](
        scores_ptr=scores,
        alpha_ptr=alpha.tensor,
        probs_ptr=probs,
        stride_scores_row=scores.stride(0),
        stride_scores_col=scores.stride(1),
        stride_alpha=alpha.stride,
        length=length,
        eps=alpha.eps,
        EPS=alpha.fixed,
        **precision(scores.dtype),
        BLOCK_N=block_n,
        **long_launch(block_n).options(),
    )


def long_launch(block_n: int) -> Launch:
    """Return the launch of a program that holds block_n lanes, 8 in each thread."""
    return RoomyLaunch(num_warps=max(block_n // 256, 1))
