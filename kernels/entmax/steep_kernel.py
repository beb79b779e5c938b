"""Device functions for rows with alpha above 2, where t alone doesn't hold enough digits.

As in `steep`, the unknown is q, the smallest probability of the support, after a search for the
support. Both searches bisect on the bits of a positive float, so that they end on neighbouring
floats after at most 31 halvings.
"""

import triton
import triton.language as tl

from sparseformer.kernels.entmax.device import TINY


@triton.jit
def steep_probabilities(y, eps, COMPUTE: tl.constexpr):
    """Return p of rows y = s - max(s), [R, N], -inf excluded; eps >= 1, [R, 1]."""
    zero = eps * 0.0
    low, high = as_bits(zero), as_bits(1.0 / eps) + 1
    while tl.max(high - low) > 1:
        middle = low + (high - low) // 2
        mass = tl.sum(mass_terms(y, middle.to(COMPUTE, bitcast=True), eps), 1)[:, None]
        low, high = tl.where(mass < 1.0, middle, low), tl.where(mass < 1.0, high, middle)
    inside = y >= -low.to(COMPUTE, bitcast=True)
    edge = tl.min(tl.where(inside, y, 0.0), 1)[:, None]
    low, high = as_bits(zero), as_bits(zero + 1.0) + 1
    while tl.max(high - low) > 1:
        middle = low + (high - low) // 2
        probs = from_smallest(y, middle.to(COMPUTE, bitcast=True), edge, eps)
        mass = tl.sum(probs, 1)[:, None]
        low, high = tl.where(mass <= 1.0, middle, low), tl.where(mass <= 1.0, high, middle)
    return from_smallest(y, low.to(COMPUTE, bitcast=True), edge, eps)


@triton.jit
def mass_terms(y, depth, eps):
    """Return p if w were 0 at depth: their sum is below 1 while depth is inside the support."""
    return _root(eps * (y + depth), eps)


@triton.jit
def from_smallest(y, smallest, edge, eps):
    """Return p of the keys at edge and above, given that p is smallest at edge."""
    power = tl.where(smallest > 0.0, tl.exp2(tl.log2(tl.maximum(smallest, TINY)) * eps), 0.0)
    above = _root(power + eps * (y - edge), eps)
    # power may be 0 by underflow where smallest isn't.
    return tl.where(y > edge, above, tl.where(y == edge, smallest, 0.0))


@triton.jit
def _root(base, eps):
    return tl.where(base > 0.0, tl.exp2(tl.log2(tl.maximum(base, TINY)) / eps), 0.0)


@triton.jit
def as_bits(value):
    """Return the bits of non-negative floats, which are ordered as the floats are."""
    if value.dtype == tl.float64:
        bits = value.to(tl.int64, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True)
    return bits
