"""Newton's method for the threshold of entmax, on cache-sized blocks of rows."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MAX_STEPS = 64
# exp2 is vectorised on CPU and takes half the time of exp.
LOG2_E = 1.4426950408889634
# Shorter rows are held transposed: reductions over a short last dim are not vectorised.
_SHORT_ROW = 128
# Large enough to hide the cost of a call, small enough to stay in the cache.
_BLOCK_NUMEL = 131_072

Eps = float | Tensor


class Block(NamedTuple):
    """Rows with their maximum shifted to 0 and scaled: y = eps (s - max s), eps = alpha - 1."""

    y: Tensor  # [rows, n] with dim = 1, [n, rows] with dim = 0
    maximum: Tensor  # [rows, 1] or [1, rows]
    eps: Eps  # a float, or shaped as maximum
    dim: int
    empty: (
        Tensor | None
    )  # shaped as maximum: rows without a finite score, where y = 0; None if none


def row_slices(rows: int, length: int) -> Iterator[slice]:
    """Cut the rows of a [rows, length] matrix into blocks that fit the cache."""
    size = max(_BLOCK_NUMEL // length, 1)
    for start in range(0, rows, size):
        yield slice(start, start + size)


def row_blocks(scores: Tensor, eps: Eps) -> Iterator[tuple[slice, Block]]:
    """Cut [rows, n] scores into blocks; eps is a float or [rows, 1]."""
    for rows in row_slices(*scores.shape):
        yield rows, _load_block(scores[rows], eps if isinstance(eps, float) else eps[rows])


def _load_block(scores: Tensor, eps: Eps) -> Block:
    dim = 0 if scores.size(1) < _SHORT_ROW else 1
    if dim == 0:
        scores = scores.t().contiguous()
        eps = eps if isinstance(eps, float) else eps.t()
    maximum = scores.amax(dim, keepdim=True)
    y = (scores - maximum).mul_(eps)
    empty = maximum == -math.inf
    if not bool(empty.any()):
        return Block(y, maximum, eps, dim, None)
    return Block(y.masked_fill_(empty, 0.0), maximum, eps, dim, empty)


def store_rows(target: Tensor, rows: slice, value: Tensor, dim: int) -> None:
    """Write what was computed on a block into its rows of target."""
    target[rows] = value.t() if dim == 0 else value


def solve_block(block: Block, max_steps: int = MAX_STEPS, *, one_step_left: bool = False) -> Tensor:
    """Return eps (t - max s) of every row, shaped as block.maximum.

    Newton's step on the r-norm, t <- t + Z (1 - Z**-eps) / (eps sum u), climbs to t from any
    lower bound. Rows that have arrived leave the block as soon as a quarter of it has.
    """
    eps, dim = block.eps, block.dim
    scaled_t = _lower_bound(block)
    y = block.y
    if dim == 1 and not _without_powers(eps):
        y = _drop_columns(y, scaled_t)
    tolerance = _tolerance(eps, y.dtype, one_step_left)
    result: Tensor = scaled_t
    rows: Tensor | None = None
    for _ in range(max_steps):
        step = _newton_step(y, scaled_t, eps, dim)
        scaled_t = scaled_t + step
        keep = (step.abs() > tolerance).flatten().nonzero().flatten()
        if keep.numel() == 0:
            break
        if 4 * keep.numel() <= 3 * scaled_t.numel():
            result = _write_back(result, rows, scaled_t)
            rows = keep if rows is None else rows[keep]
            y = y.index_select(1 - dim, keep)
            scaled_t = scaled_t.index_select(1 - dim, keep)
            eps = _select(eps, keep, dim)
            tolerance = _select(tolerance, keep, dim)
    return _write_back(result, rows, scaled_t)


def _without_powers(eps: Eps) -> bool:
    """Say whether alpha is 1.5 or 2 for all rows, where p needs neither log nor exp."""
    return isinstance(eps, float) and eps in (0.5, 1.0)


def _write_back(result: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    if rows is None:
        return values
    result.view(-1)[rows] = values.view(-1)
    return result


def _select(value: Eps, keep: Tensor, dim: int) -> Eps:
    return value if isinstance(value, float) else value.index_select(1 - dim, keep)


def _lower_bound(block: Block) -> Tensor:
    """Bound eps (t - max s) from below: by 0, and by the t of n scores that all equal the mean.

    The second bound holds because t is convex and symmetric in the scores, so averaging lowers it.
    """
    length = block.y.size(block.dim)
    if isinstance(block.eps, float):
        spread: Eps = -math.expm1(-block.eps * math.log(length))
    else:
        spread = -torch.expm1(block.eps * -math.log(length))
    return block.y.mean(block.dim, keepdim=True).add_(spread).clamp_(min=0.0)


def _tolerance(eps: Eps, dtype: torch.dtype, one_step_left: bool) -> Eps:
    """Return the |step| after which a row has arrived.

    Up to alpha = 1.5 every step squares the error, so the square root of rounding is enough, and
    its fourth root where `fold_last_step` follows. Above, keys that leave the support bend the
    function, and the step must be down to rounding.
    """
    rounding = torch.finfo(dtype).eps
    smooth, kinked = 0.3 * rounding ** (0.25 if one_step_left else 0.5), 8 * rounding
    if isinstance(eps, float):
        return eps * (smooth if eps <= 0.5 else kinked)
    return eps * torch.where(eps <= 0.5, smooth, kinked)


def _newton_step(y: Tensor, scaled_t: Tensor, eps: Eps, dim: int) -> Tensor:
    """Return eps times Newton's step for t, from Z = sum p and sum u."""
    if isinstance(eps, float) and eps == 0.5:
        root = y.sub(scaled_t - 1).clamp_(min=0)
        slope = root.sum(dim, keepdim=True)
        mass = root.square_().sum(dim, keepdim=True)
        return (mass - mass.sqrt()).div_(slope)
    if isinstance(eps, float) and eps == 1.0:
        probs = y.sub(scaled_t - 1).clamp_(min=0)
        mass = probs.sum(dim, keepdim=True)
        return mass.sub_(1).div_(probs.sign_().sum(dim, keepdim=True))
    probs, slopes = powers(y.sub(scaled_t), eps)
    mass = probs.sum(dim, keepdim=True)
    shortfall = torch.log(mass).mul_(-eps).expm1_()
    return mass.div_(slopes.sum(dim, keepdim=True)).mul_(shortfall).neg_()


def powers(w: Tensor, eps: Eps) -> tuple[Tensor, Tensor]:
    """Return p = w**(1/eps) and u = p / w, given w - 1 = eps (s - t), which is overwritten.

    log1p keeps the digits of eps (s - t) for alpha near 1, and has no slow path for w = 0 as log.
    """
    w.clamp_(min=-1)
    probs = torch.log1p(w).mul_(LOG2_E / eps).exp2_()
    # At w = 0 p is 0, so any positive divisor gives u = 0.
    w.add_(1).clamp_(min=torch.finfo(w.dtype).tiny)
    return probs, torch.div(probs, w, out=w)


def _drop_columns(y: Tensor, scaled_t: Tensor) -> Tensor:
    """Gather the scores that can be in the support at a lower bound of t, if they are few.

    Costs one pass without a transcendental; every Newton step on the rest costs two per score.
    """
    keep = y > scaled_t - 1
    counts = keep.sum(1)
    width = int(counts.max())
    if not 0 < 2 * width <= y.size(1):
        return y
    row, _ = keep.nonzero(as_tuple=True)
    slot = torch.arange(row.numel(), device=y.device) - (counts.cumsum(0) - counts)[row]
    narrow = y.new_full((y.size(0), width), -math.inf)
    narrow[row, slot] = y[keep]
    return narrow


def block_maximum(block: Block) -> Tensor:
    """Return the row maxima; 0 for a row without a finite score."""
    return block.maximum if block.empty is None else block.maximum.masked_fill(block.empty, 0.0)


def block_threshold(block: Block, scaled_t: Tensor) -> Tensor:
    """Return t of the scores minus their maximum; 0 for a row without a finite score."""
    threshold = scaled_t / block.eps
    return threshold if block.empty is None else threshold.masked_fill_(block.empty, 0.0)


def block_probabilities(block: Block, scaled_t: Tensor) -> tuple[Tensor, Tensor]:
    """Return p of a block and the t that goes with it; overwrite the scores."""
    eps = block.eps
    if isinstance(eps, float) and eps == 0.5:
        slopes = block.y.sub_(scaled_t - 1).clamp_(min=0)
        probs = slopes.square()
    elif isinstance(eps, float) and eps == 1.0:
        probs = block.y.sub_(scaled_t - 1).clamp_(min=0)
        slopes = probs.sign()
    else:
        probs, slopes = powers(block.y.sub_(scaled_t), eps)
    probs, step = _fold_last_step(probs, slopes, block.dim)
    threshold = block_threshold(block, scaled_t + step * eps)
    if block.empty is not None:
        probs.masked_fill_(block.empty, 0.0)
    return probs, threshold


def _fold_last_step(probs: Tensor, slopes: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Move p along -u until it sums to 1, overwriting both; return p and the step in t.

    Besides saving an evaluation, this normalises long rows of nearly equal scores: there the
    rounding of t is as large as w, and would put the mass off by as much as n times rounding.
    """
    step = probs.sum(dim, keepdim=True).sub_(1).div_(slopes.sum(dim, keepdim=True))
    return probs.sub_(slopes.mul_(step)).clamp_(min=0), step
