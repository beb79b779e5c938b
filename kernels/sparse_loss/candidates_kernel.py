"""Triton kernel that collects, tile by tile, the classes that the support of entmax can hold."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, kernel_input
from sparseformer.kernels.sparse_loss.device import from_ordered_bits, ordered_bits

LAUNCH = Launch(num_warps=4, num_stages=1)
BLOCK_CLASSES = 1024


@triton.jit
def _row_maximum(scores_ptr, stride_class, num_classes, BLOCK: tl.constexpr):
    """Return the largest score of a row, NaN if there is one."""
    offs = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_classes, BLOCK):
        scores = tl.load(
            scores_ptr + (start + offs).to(tl.int64) * stride_class,
            mask=start + offs < num_classes,
            other=float("-inf"),
        ).to(tl.float32)
        largest = tl.maximum(largest, scores, propagate_nan=tl.PropagateNan.ALL)
    # A reduction by maximum drops NaN, so it is counted.
    has_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
    return tl.where(has_nan, float("nan"), tl.max(largest, axis=0))


@triton.jit
def _floor(top, reach):
    """Return a bound from below of top - reach; `top` where that is infinite or NaN."""
    is_finite = (top > float("-inf")) & (top < float("inf"))
    difference = tl.where(is_finite, top, 0.0) - reach
    # The next number below, so that rounding can't raise it; the one below 0 is two bits away.
    below = from_ordered_bits(ordered_bits(difference) - tl.where(difference == 0.0, 2, 1))
    below = tl.where(difference > float("-inf"), below, difference)
    return tl.where(is_finite, below, top)


@triton.jit
def _drop(values_ptr, columns_ptr, count, floor, BLOCK: tl.constexpr):
    """Move the entries above the floor to the front, in order, and return their number.

    An entry moves to a place that the prefix sum has already read, so no barrier is needed.
    """
    offs = tl.arange(0, BLOCK)
    kept = 0
    for start in range(0, count, BLOCK):
        mask = start + offs < count
        values = tl.load(values_ptr + start + offs, mask=mask, other=float("-inf"))
        columns = tl.load(columns_ptr + start + offs, mask=mask, other=-1)
        stays = (values > floor) & mask
        places = kept + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        tl.store(values_ptr + places, values, mask=stays)
        tl.store(columns_ptr + places, columns, mask=stays)
        kept += tl.sum(stays.to(tl.int32), axis=0)
    return kept


@triton.jit
def _append(
    scores_ptr,
    values_ptr,
    columns_ptr,
    stride_class,
    num_classes,
    first_class,
    capacity,
    count,
    floor,
    BLOCK: tl.constexpr,
):
    """Write the scores above the floor behind `count` entries, and return the new number."""
    offs = tl.arange(0, BLOCK)
    for start in range(0, num_classes, BLOCK):
        mask = start + offs < num_classes
        scores = tl.load(
            scores_ptr + (start + offs).to(tl.int64) * stride_class,
            mask=mask,
            other=float("-inf"),
        ).to(tl.float32)
        found = (scores > floor) & mask
        num_found = tl.sum(found.to(tl.int32), axis=0)
        if num_found > 0:
            places = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
            fits = found & (places < capacity)
            classes = (first_class + start + offs).to(tl.int64)
            tl.store(values_ptr + places, scores, mask=fits)
            tl.store(columns_ptr + places, classes, mask=fits)
            count += num_found
    return count


@triton.jit
def _clear(values_ptr, columns_ptr, begin, end, BLOCK: tl.constexpr):
    """Empty the slots from begin to end."""
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(values_ptr + offs, float("-inf"), mask=offs < end)
        tl.store(columns_ptr + offs, -1, mask=offs < end)


@triton.jit(do_not_specialize=["first_class"])
def _collect_kernel(
    scores_ptr,
    top_ptr,
    reach_ptr,
    values_ptr,
    columns_ptr,
    counts_ptr,
    stride_scores_row,
    stride_scores_class,
    num_classes,
    first_class,
    capacity,
    reach,
    HAS_REACH_PTR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride_scores_row
    values_ptr += row * capacity
    columns_ptr += row * capacity
    old_top = tl.load(top_ptr + row)
    held = tl.load(counts_ptr + row)
    if HAS_REACH_PTR:
        reach = tl.load(reach_ptr + row)
    tile_top = _row_maximum(scores_ptr, stride_scores_class, num_classes, BLOCK)
    top = tl.maximum(old_top, tile_top, propagate_nan=tl.PropagateNan.ALL)
    tl.store(top_ptr + row, top)
    floor = _floor(top, reach)
    # Nothing that was seen before, lost entries included, is above this floor.
    count = tl.where(floor >= old_top, 0, held)
    stored = tl.minimum(held, capacity)
    if (count > 0) & (count <= capacity) & (top != old_top):
        count = _drop(values_ptr, columns_ptr, count, floor, BLOCK)
    if tile_top > floor:
        count = _append(
            scores_ptr,
            values_ptr,
            columns_ptr,
            stride_scores_class,
            num_classes,
            first_class,
            capacity,
            count,
            floor,
            BLOCK,
        )
    _clear(values_ptr, columns_ptr, count, stored, BLOCK)
    tl.store(counts_ptr + row, count)


def collect(
    scores: Tensor,
    first_class: int,
    top: Tensor,
    reach: float | Tensor,
    values: Tensor,
    columns: Tensor,
    counts: Tensor,
) -> None:
    """Update, in place, the scores of each row within reach of its maximum, over all tiles so far.

    These are the scores above top - reach, and the maximum itself. Afterwards row i of the buffers
    holds exactly them, counts[i] in number, in class order if the tiles come in class order; the
    other slots are (-inf, -1). A row with more of them than slots has counts[i] > c, and its slots
    mean nothing; it stays so until a tile raises the maximum so far that nothing seen before can
    count. A maximum that is NaN or +inf shows in `top` and has no scores in reach. Every row is
    one program: it doesn't depend on the other rows, and nothing is added by atomics.

    Args:
        scores: [n, m] tile of float32, float16 or bfloat16, any strides; column j is class
            first_class + j.
        first_class: number of classes before the tile.
        top: [n] float32, the running maximum; -inf before the first tile.
        reach: 1 / (alpha - 1), infinite for alpha = 1; or [n] of them, float32.
        values: [n, c] float32, contiguous; -inf before the first tile.
        columns: [n, c] int64, contiguous; -1 before the first tile.
        counts: [n] int32; 0 before the first tile.
    """
    num_rows, num_classes = scores.shape
    assert scores.dtype in (torch.float32, torch.float16, torch.bfloat16), scores.dtype
    assert top.dtype == values.dtype == torch.float32, (top.dtype, values.dtype)
    assert counts.dtype == torch.int32, counts.dtype
    assert all(each.is_contiguous() for each in (top, values, columns, counts))
    if num_rows == 0:
        return
    scores = kernel_input(scores)
    reaches = reach.contiguous() if isinstance(reach, Tensor) else None
    _collect_kernel[(num_rows,)](
        scores_ptr=scores,
        top_ptr=top,
        reach_ptr=reaches,
        values_ptr=values,
        columns_ptr=columns,
        counts_ptr=counts,
        stride_scores_row=scores.stride(0),
        stride_scores_class=scores.stride(1),
        num_classes=num_classes,
        first_class=first_class,
        capacity=values.shape[1],
        reach=0.0 if isinstance(reach, Tensor) else reach,
        HAS_REACH_PTR=reaches is not None,
        BLOCK=BLOCK_CLASSES,
        **LAUNCH.options(),
    )
