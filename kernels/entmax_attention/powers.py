"""p and u of a tile of scores, and the alpha term, as quickly as the inputs' rounding allows.

QUICK is the constexpr of kernels whose inputs have 16 bits. With a learned alpha those take the
GPU's own logarithm, whose error is far below the rounding of p to 16 bits.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from sparseformer.kernels.common.backends import is_interpreting
from sparseformer.kernels.entmax.device import (
    LN_2,
    LOG2_E,
    SERIES_END,
    TINY,
    alpha_series,
    general_powers,
    powers,
)

# The interpreter has no instructions of a GPU. Triton reads the setting when it decorates.
INTERPRETED: tl.constexpr = tl.constexpr(is_interpreting())
# Up to here log2(1 + x) is a series: beyond it an error of 2**-22 is 5e-6 of it at most.
NEAR_ONE: tl.constexpr = tl.constexpr(2.0**-5)
# Keeps 0 exactly 0 where alpha = 2 and u = w ** 0, and moves log2 u by 2e-5 at most.
LEAST_EXPONENT: tl.constexpr = tl.constexpr(2.0**-20)
# More than -log w of any w above 0; p and u are 0 beyond it.
LARGEST_FALL: tl.constexpr = tl.constexpr(128.0)


@triton.jit
def tile_powers(distance, eps, EPS: tl.constexpr, QUICK: tl.constexpr):
    """Return p and u as entmax.device.powers does, quickly where alpha is learned and QUICK."""
    if QUICK and EPS is None:
        probs, slopes, _ = _quick_powers(distance, eps)
    else:
        probs, slopes = powers(distance, eps, EPS)
    return probs, slopes


@triton.jit
def learned_powers(distance, eps, QUICK: tl.constexpr):
    """Return p, u and -log w, w = 1 + eps distance; where w is 0, p and u are 0."""
    if QUICK:
        probs, slopes, log_w = _quick_powers(distance, eps)
        fall = tl.minimum(log_w * -LN_2, LARGEST_FALL)
    else:
        probs, slopes, log_w = general_powers(distance, eps)
        fall = -log_w
    return probs, slopes, fall


@triton.jit
def learned_alpha_term(probs, slopes, fall):
    """Return eps**2 p g of d alpha = sum p g (dP - delta); 0 where p and u are.

    g as in entmax.device.alpha_term: with y = -log w, eps**2 p g = p (1 + y) - u, and u = p exp(y).

    Args:
        probs: p.
        slopes: u.
        fall: y.
    """
    series = alpha_series(tl.minimum(fall, SERIES_END))
    near = -probs * (fall * fall * series)
    return tl.where(fall < SERIES_END, near, probs * fall + probs - slopes)


@triton.jit
def _quick_powers(distance, eps):
    """Return p, u and log2 w, -inf where w is 0, so that p and u are exactly 0 there."""
    inverse = 1.0 / eps
    gap = tl.maximum(distance * eps, -1.0)
    series = gap * (LOG2_E / 3.0 - gap * (LOG2_E / 4.0)) - LOG2_E / 2.0
    series = gap * (gap * series + LOG2_E)
    log_w = tl.where(tl.abs(gap) < NEAR_ONE, series, quick_log2(gap + 1.0))
    probs = tl.exp2(log_w * inverse)
    slopes = tl.exp2(log_w * tl.maximum(inverse - 1.0, LEAST_EXPONENT))
    return probs, slopes, log_w


@triton.jit
def quick_log2(x):
    """Return log2 of x >= 0 with the GPU's own instruction, -inf at 0.

    Off by at most 2**-22, or 2**-22 of the result outside of (0.5, 2); denormal x count as 0 (PTX
    ISA, lg2.approx.ftz.f32).
    """
    if INTERPRETED:
        result = tl.where(x > 0.0, tl.log2(tl.maximum(x, TINY)), float("-inf"))
    else:
        result = libdevice.fast_log2f(x)
    return result
