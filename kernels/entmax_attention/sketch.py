"""The lane sketch of a block of queries: the largest scores of each lane, and t solved on them."""

import triton
import triton.language as tl

from sparseformer.kernels.entmax.device import newton_step
from sparseformer.kernels.entmax_attention.powers import tile_powers

# About 4 to 8 are taken; the limit is for rows that hold NaN.
MAX_SOLVE_STEPS: tl.constexpr = tl.constexpr(64)
# How far sum p is off after a step of third order, over the cube of how far it was off before:
# measured on normal scores, where alpha is at most 1.5 and where it is larger.
ESTIMATE_ERROR: tl.constexpr = tl.constexpr(0.03)
STEEP_ESTIMATE_ERROR: tl.constexpr = tl.constexpr(1.0)


@triton.jit
def sketch_insert(scores, top1, top2, top3, top4, DEPTH: tl.constexpr):
    """Return the DEPTH largest scores of each lane, a lane being a place in the tile."""
    rest = tl.minimum(top1, scores)
    top1 = tl.maximum(top1, scores)
    if DEPTH >= 2:
        rest2 = tl.minimum(top2, rest)
        top2 = tl.maximum(top2, rest)
        if DEPTH >= 3:
            rest3 = tl.minimum(top3, rest2)
            top3 = tl.maximum(top3, rest2)
            if DEPTH >= 4:
                top4 = tl.maximum(top4, rest3)
    return top1, top2, top3, top4


@triton.jit
def support_size(threshold, top1, top2, top3, top4, reach, DEPTH: tl.constexpr):
    """Return how many kept scores of each row are in the support."""
    border = threshold[:, None] - reach
    count = tl.sum(tl.where(top1 > border, 1.0, 0.0), 1)
    if DEPTH >= 2:
        count += tl.sum(tl.where(top2 > border, 1.0, 0.0), 1)
    if DEPTH >= 3:
        count += tl.sum(tl.where(top3 > border, 1.0, 0.0), 1)
    if DEPTH >= 4:
        count += tl.sum(tl.where(top4 > border, 1.0, 0.0), 1)
    return count


@triton.jit
def dropped_mass(
    threshold,
    top1,
    top2,
    top3,
    top4,
    eps,
    reach,
    EPS: tl.constexpr,
    QUICK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return about the sum of p of each row that the sketch has dropped; 0 if it is exactly 0.

    What a lane dropped lies below its last kept score: outside of the support if that one is. Else
    p is assumed to fall off as the last two do, and the number of a lane's keys in the support to
    be Poisson's, so that one more comes with the chance mean / (DEPTH + 1).
    """
    at = threshold[:, None]
    count = support_size(threshold, top1, top2, top3, top4, reach, DEPTH)
    before, last = top1, top1
    if DEPTH == 2:
        last = top2
    if DEPTH == 3:
        before, last = top2, top3
    if DEPTH == 4:
        before, last = top3, top4
    above, _ = tile_powers(before - at, eps, EPS, QUICK)
    kept, _ = tile_powers(last - at, eps, EPS, QUICK)
    fallen = tl.sum(kept * (kept / tl.where(above > 0.0, above, 1.0)), 1)
    return fallen * tl.minimum(count / (top1.shape[1] * (DEPTH + 1)), 1.0)


@triton.jit
def solve_on_sketch(
    threshold,
    top1,
    top2,
    top3,
    top4,
    eps,
    max_steps,
    CLOSE: tl.constexpr,
    ROUNDING: tl.constexpr,
    EPS: tl.constexpr,
    QUICK: tl.constexpr,
    DEPTH: tl.constexpr,
    weight=1.0,
):
    """Return t of each row, by Newton's method from a lower bound on the kept scores.

    A subset of a row has a smaller t, so the result is a lower bound again where weight is 1. Else
    every kept score stands for `weight` equal ones. Scores below all supports aren't looked at.

    Args:
        threshold: the lower bounds, [BLOCK_M].
        top1: the largest score of each lane, [BLOCK_M, lanes]; then the next ones, up to DEPTH.
        eps: alpha - 1, read only where EPS is None.
        max_steps: the most that are taken.
        CLOSE: a step from where sum p is this close to 1 is the last one. It leaves about a quarter
            of CLOSE**2 up to alpha = 1.5; above, where the support has sharper borders, it is
            taken from CLOSE**2 itself.
        ROUNDING: a step below this share of t is rounding.
        weight: of each kept score.
    """
    if EPS is None:
        reach = 1.0 / eps
        close = tl.where(eps > 0.5, CLOSE * CLOSE, CLOSE)
    elif EPS == 0.0:
        reach = float("inf")
        close = CLOSE
    else:
        reach = 1.0 / EPS
        close = CLOSE * CLOSE if EPS > 0.5 else CLOSE
    border = threshold - reach
    holds2, holds3, holds4 = 0, 0, 0
    if DEPTH >= 2:
        holds2 = _any_above(top2, border)
    if DEPTH >= 3:
        holds3 = _any_above(top3, border)
    if DEPTH >= 4:
        holds4 = _any_above(top4, border)
    step = 0
    while step < max_steps:
        at = threshold[:, None]
        probs, slopes = tile_powers(top1 - at, eps, EPS, QUICK)
        if DEPTH >= 2:
            if holds2 != 0:
                more, more_slopes = tile_powers(top2 - at, eps, EPS, QUICK)
                probs, slopes = probs + more, slopes + more_slopes
        if DEPTH >= 3:
            if holds3 != 0:
                more, more_slopes = tile_powers(top3 - at, eps, EPS, QUICK)
                probs, slopes = probs + more, slopes + more_slopes
        if DEPTH >= 4:
            if holds4 != 0:
                more, more_slopes = tile_powers(top4 - at, eps, EPS, QUICK)
                probs, slopes = probs + more, slopes + more_slopes
        mass, slope = weight * tl.sum(probs, 1), weight * tl.sum(slopes, 1)
        # Climbing ends in rounding, where a step may go down.
        move = tl.maximum(newton_step(mass, slope, eps, EPS), 0.0)
        threshold += move
        is_moving = (move > ROUNDING * (1.0 + tl.abs(threshold))) & (mass - 1.0 > close)
        step = tl.where(tl.max(is_moving.to(tl.int32), 0) > 0, step + 1, max_steps)
    return threshold


@triton.jit
def _any_above(scores, border):
    """Return 1 if some row has a score above its border, else 0."""
    return tl.max((tl.max(scores, 1) > border).to(tl.int32), 0)


@triton.jit
def sums_of(distance, cap, eps, EPS: tl.constexpr, QUICK: tl.constexpr):
    """Return sum p, sum u and sum u / w of each row, whose distances to t are given.

    They are Z(t), -Z'(t) and Z''(t) / (1 - eps). 1 / w has no bound at the border of the support,
    but a key there leaves it as soon as t moves; so 1 / w is cut off at `cap`.
    """
    probs, slopes = tile_powers(distance, eps, EPS, QUICK)
    if EPS == 0.5:
        bends = tl.where(slopes > 0.0, 1.0, 0.0)
    else:
        inverse = slopes / tl.where(probs > 0.0, probs, 1.0)
        bends = slopes * tl.minimum(inverse, cap[:, None])
    return tl.sum(probs, 1), tl.sum(slopes, 1), tl.sum(bends, 1)


@triton.jit
def sketch_sums(
    threshold,
    cap,
    top1,
    top2,
    top3,
    top4,
    eps,
    EPS: tl.constexpr,
    QUICK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return sums_of the kept scores of each row at t."""
    at = threshold[:, None]
    mass, slope, bend = sums_of(top1 - at, cap, eps, EPS, QUICK)
    if DEPTH >= 2:
        masses, slopes, bends = sums_of(top2 - at, cap, eps, EPS, QUICK)
        mass, slope, bend = mass + masses, slope + slopes, bend + bends
    if DEPTH >= 3:
        masses, slopes, bends = sums_of(top3 - at, cap, eps, EPS, QUICK)
        mass, slope, bend = mass + masses, slope + slopes, bend + bends
    if DEPTH >= 4:
        masses, slopes, bends = sums_of(top4 - at, cap, eps, EPS, QUICK)
        mass, slope, bend = mass + masses, slope + slopes, bend + bends
    return mass, slope, bend


@triton.jit
def move_estimate(mass, slope, bend, weight, eps, EPS: tl.constexpr):
    """Return the step to the t of weight * mass = 1 by Halley's method, slope there, and doubt.

    Where more keys follow, weight extrapolates from those seen. The doubt is how far sum p of the
    keys seen may be off after the step.
    """
    if EPS is None:
        curved = 1.0 - eps
        error = tl.where(eps > 0.5, STEEP_ESTIMATE_ERROR, ESTIMATE_ERROR)
    else:
        curved = 1.0 - EPS
        error = ESTIMATE_ERROR
    has_mass = slope > 0.0
    safe = tl.where(has_mass, slope, 1.0)
    newton = newton_step(weight * mass, weight * slope, eps, EPS)
    # Newton's method on the convex G goes too low; by how much, G'' tells.
    bow = 0.5 * newton * curved * (bend / safe - slope / tl.where(has_mass, mass, 1.0))
    step = newton / (1.0 - tl.maximum(tl.minimum(bow, 0.5), -1.0))
    slope_there = slope * tl.maximum(1.0 - step * curved * bend / safe, 0.1)
    gap = tl.abs(weight * mass - 1.0)
    doubt = tl.where(has_mass, gap * gap * gap * (error / weight), float("inf"))
    return step, slope_there, doubt


@triton.jit
def largest_bend(peak, threshold, reach):
    """Return the `cap` of sums_of: 8 / w of the largest score of each row."""
    return 8.0 / tl.maximum(1.0 - (threshold - peak) / reach, 2.0**-12)
