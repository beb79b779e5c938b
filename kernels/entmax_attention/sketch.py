"""The lane sketch of a block of queries: the largest scores of each lane, and t solved on them."""

import triton
import triton.language as tl

from sparseformer.kernels.entmax.device import newton_step, powers

# About 4 to 8 are taken; the limit is for rows that hold NaN.
MAX_SOLVE_STEPS: tl.constexpr = tl.constexpr(64)


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
def dropped_mass(
    threshold, top1, top2, top3, top4, eps, reach, EPS: tl.constexpr, DEPTH: tl.constexpr
):
    """Return about the sum of p of each row that the sketch has dropped; 0 if it is exactly 0.

    What a lane dropped lies below its last kept score: outside of the support if that one is. Else
    p is assumed to fall off as the last two do, and the number of a lane's keys in the support to
    be Poisson's, so that one more comes with the chance mean / (DEPTH + 1).
    """
    at = threshold[:, None]
    count = tl.sum(tl.where(top1 > at - reach, 1.0, 0.0), 1)
    before, last = top1, top1
    if DEPTH >= 2:
        count += tl.sum(tl.where(top2 > at - reach, 1.0, 0.0), 1)
        last = top2
    if DEPTH >= 3:
        count += tl.sum(tl.where(top3 > at - reach, 1.0, 0.0), 1)
        before, last = top2, top3
    if DEPTH >= 4:
        count += tl.sum(tl.where(top4 > at - reach, 1.0, 0.0), 1)
        before, last = top3, top4
    above, _ = powers(before - at, eps, EPS)
    kept, _ = powers(last - at, eps, EPS)
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
    ROUNDING: tl.constexpr,
    EPS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return t of each row, by Newton's method from a lower bound on the kept scores.

    A subset of a row has a smaller t, so the result is a lower bound again.
    """
    at = threshold[:, None]
    step = 0
    while step < max_steps:
        probs, slopes = powers(top1 - at, eps, EPS)
        if DEPTH >= 2:
            more, more_slopes = powers(top2 - at, eps, EPS)
            probs += more
            slopes += more_slopes
        if DEPTH >= 3:
            more, more_slopes = powers(top3 - at, eps, EPS)
            probs += more
            slopes += more_slopes
        if DEPTH >= 4:
            more, more_slopes = powers(top4 - at, eps, EPS)
            probs += more
            slopes += more_slopes
        move = newton_step(tl.sum(probs, 1), tl.sum(slopes, 1), eps, EPS)
        # Climbing ends in rounding, where a step may go down.
        move = tl.maximum(move, 0.0)
        threshold += move
        at = threshold[:, None]
        is_moving = move > ROUNDING * (1.0 + tl.abs(threshold))
        step = tl.where(tl.max(is_moving.to(tl.int32), 0) > 0, step + 1, max_steps)
    return threshold
