"""Device functions of entmax that Triton kernels share: p and u, Newton's step, the alpha term.

Everywhere eps = alpha - 1. EPS is its constexpr: 0.0, 0.5 or 1.0 for alpha = 1, 1.5 and 2, which
have shorter ways, else None; then eps is read, a run-time float or a tensor that broadcasts, at
least `MIN_EPS`. All is computed in fp32; float64 works under the interpreter.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# A learned alpha of 1 becomes 1 + MIN_EPS, which differs from softmax by less than rounding.
MIN_EPS: tl.constexpr = tl.constexpr(1.1920928955078125e-07)
# Newton's method takes about 4 to 8; the limit is for rows that hold NaN.
MAX_STEPS: tl.constexpr = tl.constexpr(64)
# The smallest normal fp32: log2 of 0 and of denormal numbers isn't needed.
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# Above alpha = 2, u has no bound; up to 2**64 its square stays finite.
LARGEST_LOG_SLOPE: tl.constexpr = tl.constexpr(64.0)
# Up to here (exp(y) - 1 - y) / y**2 is summed as a series; beyond it the quotient keeps its digits.
SERIES_END: tl.constexpr = tl.constexpr(0.3)


@triton.jit
def powers(distance, eps, EPS: tl.constexpr):
    """Return p = w ** (1 / eps) and u = p / w = -dp/dt, w = max(1 + eps distance, 0).

    distance = s - t, any shape, -inf for an excluded key; both results are exactly 0 where w is.
    """
    if EPS == 0.0:
        probs = tl.exp2(distance * LOG2_E)
        slopes = probs
    elif EPS == 0.5:
        slopes = tl.maximum(distance * 0.5 + 1.0, 0.0)
        probs = slopes * slopes
    elif EPS == 1.0:
        probs = tl.maximum(distance + 1.0, 0.0)
        slopes = tl.where(probs > 0.0, 1.0, 0.0).to(probs.dtype)
    else:
        probs, slopes, _ = general_powers(distance, eps)
    return probs, slopes


@triton.jit
def general_powers(distance, eps):
    """Return p and u, and log w where w > 0, elsewhere some number below -16."""
    gap = tl.maximum(distance * eps, -1.0)
    w = gap + 1.0
    log_w = log1p(gap)
    probs = tl.where(w > 0.0, tl.exp2(log_w * (LOG2_E / eps)), 0.0)
    return probs, probs / tl.maximum(w, TINY), log_w


@triton.jit
def newton_step(mass, slope, eps, EPS: tl.constexpr):
    """Return the step of t from mass = sum p and slope = sum u, both at t; 0 where slope is 0.

    mass (1 - mass ** -eps) / (eps slope) climbs to the root from any lower bound.
    """
    divisor = tl.where(slope > 0.0, slope, 1.0)
    if EPS == 0.0:
        step = tl.log2(tl.where(slope > 0.0, mass, 1.0)) * LN_2
    elif EPS == 0.5:
        step = 2.0 * (mass - tl.sqrt(mass)) / divisor
    elif EPS == 1.0:
        step = (mass - 1.0) / divisor
    else:
        step = -mass * expm1(-eps * log1p(mass - 1.0)) / (eps * divisor)
    return tl.where(slope > 0.0, step, 0.0)


@triton.jit
def slopes_from(probs, eps, EPS: tl.constexpr):
    """Return u = p ** (2 - alpha) on the support and 0 off it, from p alone."""
    if EPS == 0.0:
        slopes = probs
    elif EPS == 0.5:
        slopes = tl.sqrt(probs)
    elif EPS == 1.0:
        slopes = tl.where(probs > 0.0, 1.0, 0.0).to(probs.dtype)
    else:
        log_slopes = tl.log2(tl.maximum(probs, TINY)) * (1.0 - eps)
        slopes = tl.where(probs > 0.0, tl.exp2(tl.minimum(log_slopes, LARGEST_LOG_SLOPE)), 0.0)
    return slopes


@triton.jit
def alpha_term(probs, slopes, eps, EPS: tl.constexpr):
    """Return p g of d alpha = sum p g (dP - delta), delta = sum u dP / sum u; 0 off the support.

    g = ((1 - exp(-x)) / eps - L) / eps, L = log p, x = eps L; at alpha = 1, g = -L**2 / 2. Above
    alpha = 2 a multiple of u, which that sum cancels, is left out: u has no bound there.
    """
    log_probs = tl.log2(tl.maximum(probs, TINY)) * LN_2
    if EPS == 0.0:
        term = -0.5 * probs * log_probs * log_probs
    else:
        if EPS is None:
            e = eps
        else:
            e = EPS
        y = -e * log_probs
        without_slopes = (probs * y + probs) / (e * e)
        near = -alpha_series(tl.minimum(y, SERIES_END)) * log_probs * log_probs * probs
        term = tl.where(y < SERIES_END, near, without_slopes - slopes / (e * e))
        if EPS is None:
            term = tl.where(e > 1.0, without_slopes, term)
    return tl.where(probs > 0.0, term, 0.0)


@triton.jit
def log1p(x):
    """Return log(1 + x) for x > -1 to about one ulp, and some finite value at x = -1.

    tl.log2 may be off by 2e-7 near 1, which 1 / eps magnifies. Here 1 + x = 2**k (1 + m), m in
    [-0.25, 0.5), and log(1 + m) is a polynomial: about 20 instructions, none transcendental.
    """
    if x.dtype == tl.float64:
        w = x + 1.0
        beside_one = tl.where(w == 1.0, 1.0, w - 1.0)
        result = tl.where(w == 1.0, x, tl.log(tl.maximum(w, TINY)) * (x / beside_one))
    else:
        # -1 would overflow; its neighbour is -1 + 2**-24.
        x = tl.maximum(x, -0.99999994)
        # 0x3f400000 is 0.75: the exponent of (1 + x) / 0.75, still at the exponent's place.
        exponent = ((x + 1.0).to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
        four = (0x40800000 - exponent).to(tl.float32, bitcast=True)  # 4 * 2**-k
        scaled = (x.to(tl.int32, bitcast=True) - exponent).to(tl.float32, bitcast=True)
        m = scaled + (four * 0.25 - 1.0)
        square = m * m
        even = square * -4.53948975e-2 - 1.32274792e-1
        even = even * square - 1.66412741e-1
        even = even * square - 2.50002742e-1
        odd = square * 1.05468750e-1 + 1.44911826e-1
        odd = odd * square + 1.99887201e-1
        series = (odd * m + even) * m + 3.33335280e-1
        series = series * m - 4.99999970e-1
        # exponent holds k * 2**23.
        result = exponent.to(tl.float32) * (LN_2 * 1.1920928955078125e-07) + (series * square + m)
    return result


@triton.jit
def expm1(x):
    """Return exp(x) - 1 for x <= 88, with relative accuracy also near 0 (Kahan's quotient)."""
    power = tl.exp2(x * LOG2_E)
    less_one = power - 1.0
    trivial = (less_one == 0.0) | (power < 0.25) | (power > 4.0)
    logarithm = log1p(tl.where(trivial, 1.0, less_one))
    return tl.where(less_one == 0.0, x, less_one * tl.where(trivial, 1.0, x / logarithm))


@triton.jit
def alpha_series(y):
    """Return (exp(y) - 1 - y) / y**2 for y in [0, 0.3].

    In fp32 a polynomial of least relative error, 2e-9; in float64 the Taylor series.
    """
    if y.dtype == tl.float64:
        total = y * 7.647163731819816e-13 + 1.1470745597729725e-11  # 1 / 15!, 1 / 14!
        total = total * y + 1.6059043836821613e-10
        total = total * y + 2.08767569878681e-09
        total = total * y + 2.505210838544172e-08
        total = total * y + 2.755731922398589e-07
        total = total * y + 2.7557319223985893e-06
        total = total * y + 2.48015873015873e-05
        total = total * y + 1.984126984126984e-04
        total = total * y + 1.3888888888888889e-03
        total = total * y + 8.333333333333333e-03
        total = total * y + 4.1666666666666664e-02
        total = total * y + 1.6666666666666666e-01
        total = total * y + 0.5
    else:
        total = y * 1.546648165e-03 + 8.291291651e-03
        total = total * y + 4.167118492e-02
        total = total * y + 1.666664979e-01
        total = total * y + 0.5
    return total
