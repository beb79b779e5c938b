"""Device functions for long rows with alpha above 2: `steep_kernel` on a row read in blocks."""

import triton
import triton.language as tl

from sparseformer.kernels.entmax.row_input import load_tile, store_tile
from sparseformer.kernels.entmax.steep_kernel import as_bits, from_smallest, mass_terms


@triton.jit
def steep_row(row_ptr, out_ptr, eps, length, stride, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write p of one row whose eps is above 1; about 64 passes."""
    maximum, taint = _maximum(row_ptr, length, stride, COMPUTE, BLOCK_N)
    zero = eps * 0.0
    low, high = as_bits(zero), as_bits(1.0 / eps) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        depth = middle.to(COMPUTE, bitcast=True)
        mass = tl.zeros([BLOCK_N], COMPUTE)
        for start in range(0, length, BLOCK_N):
            scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
            mass += mass_terms(scores - maximum, depth, eps)
        below = tl.sum(mass, 0) < 1.0
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    depth = low.to(COMPUTE, bitcast=True)
    edge = _edge(row_ptr, maximum, depth, length, stride, COMPUTE, BLOCK_N)
    low, high = as_bits(zero), as_bits(zero + 1.0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        smallest = middle.to(COMPUTE, bitcast=True)
        mass = tl.zeros([BLOCK_N], COMPUTE)
        for start in range(0, length, BLOCK_N):
            scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
            mass += from_smallest(scores - maximum, smallest, edge, eps)
        below = tl.sum(mass, 0) <= 1.0
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    smallest = low.to(COMPUTE, bitcast=True)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        probs = from_smallest(scores - maximum, smallest, edge, eps) + taint
        store_tile(out_ptr, start, length, probs, BLOCK_N)


@triton.jit
def _maximum(row_ptr, length, stride, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the largest score (0 if none is finite), and NaN for a row that holds NaN or inf."""
    best = tl.full([BLOCK_N], float("-inf"), COMPUTE)
    odd = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        odd = odd | ((scores != scores) | (scores == float("inf"))).to(tl.int32)
        best = tl.maximum(best, scores)
    maximum = tl.max(best, 0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    return maximum, tl.where(tl.max(odd, 0) > 0, float("nan"), 0.0)


@triton.jit
def _edge(row_ptr, maximum, depth, length, stride, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the smallest score of the support."""
    edge = tl.zeros([BLOCK_N], COMPUTE)
    for start in range(0, length, BLOCK_N):
        scores = load_tile(row_ptr, start, length, stride, float("-inf"), COMPUTE, BLOCK_N)
        y = scores - maximum
        edge = tl.minimum(edge, tl.where(y >= -depth, y, 0.0))
    return tl.min(edge, 0)
