"""Which classes of a row of logits stay in the sum: top-k, top-p, and what entmax can reach."""

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen

# Rows are bisected in blocks that stay in the cache.
_BLOCK_NUMEL = 131_072
# After these, 1/4096 of the range of the scores is left to sort.
_BISECTIONS = 12


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row and their columns, in ascending order of column.

    Of equal scores at the k-th place the lowest columns stay, whatever the device's topk does.
    """
    if k >= scores.shape[-1]:
        columns = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
        return scores, columns
    values, columns = scores.topk(k + 1, dim=-1)
    columns = columns[:, :k]
    last = values[:, k - 1]
    tied = ((last == values[:, k]) & (last > -torch.inf)).nonzero()[:, 0]
    if tied.numel() > 0:
        columns[tied] = _lowest_columns(scores[tied], last[tied, None], k)
    columns = columns.sort(dim=-1).values
    return scores.gather(-1, columns), columns


def merge_top_k(
    scores: Tensor, first_class: int, kept: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge a tile of scores into the k largest so far; of equal ones the lowest classes stay.

    Args:
        scores: [n, m], of the classes from first_class.
        first_class: above every class in `columns`.
        kept: [n, k] scores so far, in order of class; -inf in an empty slot.
        columns: [n, k] int64 classes of `kept`; -1 in an empty slot.

    Returns:
        The new kept and columns. Which classes the slots at -inf name is left open.
    """
    values, places = top_k(scores, min(kept.shape[-1], scores.shape[-1]))
    merged, order = top_k(torch.cat([kept, values.to(kept.dtype)], -1), kept.shape[-1])
    return merged, torch.cat([columns, places + first_class], -1).gather(-1, order)


def empty_top_k(num_rows: int, k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return kept scores and columns of no tile yet, to merge into."""
    kept = like.new_full((num_rows, k), -torch.inf)
    return kept, torch.full(kept.shape, -1, dtype=torch.int64, device=like.device)


def merge_top_k_on(
    backend: Chosen, scores: Tensor, first_class: int, kept: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Call a backend's `merge_top_k`."""
    if backend == "triton":
        from sparseformer.kernels.sparse_loss import topk_kernel

        if kept.shape[-1] <= topk_kernel.MAX_K:
            return topk_kernel.merge_top_k(scores, first_class, kept, columns)
    return merge_top_k(scores, first_class, kept, columns)


def select_top_k(backend: Chosen, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `top_k` of whole rows from a backend."""
    if backend != "triton" or k >= scores.shape[-1]:
        return top_k(scores, k)
    kept, columns = merge_top_k_on(backend, scores, 0, *empty_top_k(scores.shape[0], k, scores))
    return kept, columns.clamp_(min=0)


def _lowest_columns(scores: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Return k columns per row: all above the threshold, then the first that equal it."""
    # NaN counts as above the threshold, so that a bad row keeps its shape until it is refused.
    above = ~(scores <= threshold)
    equal = scores == threshold
    wanted = k - above.sum(-1, keepdim=True)
    equal &= equal.cumsum(-1, dtype=torch.int32) <= wanted
    return (above | equal).nonzero()[:, 1].view(-1, k)


def top_p(scores: Tensor, p: float, top: Tensor) -> Tensor:
    """Return whether each score is in the smallest set of largest ones with the softmax mass p.

    Of equal scores at the last place the lowest columns stay. `top` is the maximum of each row.
    """
    if p == 1.0:
        return scores > -torch.inf
    kept = torch.empty_like(scores, dtype=torch.bool)
    centre = top.masked_fill(top == -torch.inf, 0.0)[:, None]
    size = max(_BLOCK_NUMEL // scores.shape[1], 1)
    for start in range(0, scores.shape[0], size):
        rows = slice(start, start + size)
        kept[rows] = _top_p_block(scores[rows] - centre[rows], p)
    return kept


def _top_p_block(centred: Tensor, p: float) -> Tensor:
    """Bisect the score of the last place, then sort the few that are left between the bounds."""
    exps = centred.exp()
    total = exps.sum(-1, keepdim=True)
    wanted, high = p * total, torch.ones_like(total)
    # All scores below this one hold less than 1 - p together, whatever the rounding.
    low = (0.5 * (1.0 - p)) * total / centred.shape[1]
    for _ in range(_BISECTIONS):
        middle = (low * high).sqrt_()
        # The sum over exps > middle; with a mask of booleans it takes five times as long.
        mass = exps.sub(middle).clamp_(min=0).sign_().mul_(exps).sum(-1, keepdim=True)
        enough = mass >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    kept = exps > high
    rows, columns = ((exps > low) & ~kept).nonzero(as_tuple=True)
    values, columns = pad_rows(rows, columns, centred[rows, columns], centred.shape[0])
    values, order = values.sort(dim=-1, descending=True, stable=True)
    band = values.exp()
    # What the larger scores hold without this one: it stays while that is too little.
    before = (exps * kept).sum(-1, keepdim=True) + band.cumsum(-1) - band
    stays = (before < wanted) & (values > -torch.inf)
    kept[stays.nonzero()[:, 0], columns.gather(-1, order)[stays]] = True
    return kept


def reachable(top: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the score of each row below which no class is in the support: max - 1/(alpha - 1)."""
    if isinstance(alpha, Tensor):
        return below(top[:, None], 1.0 / (alpha - 1.0))
    return below(top, 1.0 / (alpha - 1.0) if alpha > 1.0 else torch.inf)[:, None]


def below(top: Tensor, reach: float | Tensor) -> Tensor:
    """Return a bound from below of top - reach, whatever the rounding; less than top, therefore."""
    difference = top - reach
    return difference.nextafter(torch.full_like(difference, -torch.inf))


def collect(
    scores: Tensor,
    first_class: int,
    top: Tensor,
    reach: float | Tensor,
    values: Tensor,
    columns: Tensor,
    counts: Tensor,
) -> None:
    """Update, in place, the scores of each row above its maximum less reach, over all tiles so far.

    This is the definition, row by row, of what the kernel does.

    Args:
        scores: [n, m], of the classes from first_class.
        first_class: above every class in `columns`.
        top: [n], the running maximum; -inf before the first tile.
        reach: 1 / (alpha - 1), a float or [n].
        values: [n, c] these scores in order of class, -inf in the slots after them.
        columns: [n, c] int64, their classes; -1 in the slots after them.
        counts: [n] int32, how many there are. Above c a row's slots mean nothing, until a tile
            raises the maximum so far that nothing seen before is above the floor.
    """
    old_top, room = top.clone(), values.shape[-1]
    torch.maximum(top, scores.amax(-1), out=top)
    floor = below(top, reach)
    for row, score in enumerate(scores.to(values.dtype)):
        held = 0 if floor[row] >= old_top[row] else int(counts[row])
        stays = (values[row, : min(held, room)] > floor[row]).nonzero()[:, 0]
        found = (score > floor[row]).nonzero()[:, 0]
        before = held if held > room else stays.numel()
        kept = torch.cat([values[row, stays], score[found]])[:room]
        classes = torch.cat([columns[row, stays], found + first_class])[:room]
        values[row], columns[row] = -torch.inf, -1
        values[row, : kept.numel()], columns[row, : kept.numel()] = kept, classes
        counts[row] = before + found.numel()


def collect_on(
    backend: Chosen,
    scores: Tensor,
    first_class: int,
    top: Tensor,
    reach: float | Tensor,
    values: Tensor,
    columns: Tensor,
    counts: Tensor,
) -> None:
    """Call a backend's `collect`."""
    if backend == "triton":
        from sparseformer.kernels.sparse_loss import candidates_kernel

        candidates_kernel.collect(scores, first_class, top, reach, values, columns, counts)
    else:
        collect(scores, first_class, top, reach, values, columns, counts)


def candidates(scores: Tensor, floor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the scores above the floor and their columns, padded with -inf; None if too many.

    More than a quarter of the row in any one row is too many to be worth the gather.
    """
    found = scores > floor
    if scores.shape[0] == 0 or 4 * int(found.sum(-1).max()) > scores.shape[-1]:
        return None
    rows, columns = found.nonzero(as_tuple=True)
    return pad_rows(rows, columns, scores[rows, columns], scores.shape[0])


def pad_rows(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return values by row, padded with -inf to [num_rows, widest], and their columns.

    `rows` is sorted; there is at least one row, and the width is at least 1.
    """
    counts = torch.bincount(rows, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    places = torch.arange(rows.numel(), device=rows.device) - starts[rows]
    shape = (num_rows, max(int(counts.max()), 1))
    padded_values = values.new_full(shape, -torch.inf)
    padded_columns = columns.new_zeros(shape)
    padded_values[rows, places] = values
    padded_columns[rows, places] = columns
    return padded_values, padded_columns
