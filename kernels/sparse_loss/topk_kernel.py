"""Triton kernel that merges a tile of logits into the running k largest of each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, kernel_input
from sparseformer.kernels.sparse_loss.device import (
    EMPTY_KEY,
    LARGEST_KEY,
    NO_CLASS,
    ordered_bits,
    pack,
    sort,
    sort_bitonic,
    unpack_classes,
    unpack_scores,
)

# The list is sorted in the registers of one warp.
MAX_K = 256
LAUNCH = Launch(num_warps=1, num_stages=1)
# Slots of a list, and the groups of as many classes that are read at once: what fits in registers.
GROUPS = {64: 16, 256: 2}
# In place of a score that is in the list already; below the bits of every score.
TAKEN = tl.constexpr(-(2**31))


@triton.jit
def _kth_key(best, k, slots):
    """Return the smallest of the k keys."""
    return tl.min(tl.where(slots < k, best, LARGEST_KEY), axis=0)


@triton.jit
def _lane_maxima(ordered, first_class, slots, WIDTH: tl.constexpr):
    """Return the keys of the largest scores of each lane, and their groups, the lowest of equals.

    first_class is that of the lane's first score.
    """
    rank, group = tl.max(ordered, axis=0, return_indices=True)
    keys = pack(rank, first_class + group * WIDTH + slots)
    return tl.where(rank == TAKEN, EMPTY_KEY, keys), group


@triton.jit(do_not_specialize=["first_class"])
def _merge_top_k_kernel(
    scores_ptr,
    kept_ptr,
    columns_ptr,
    new_kept_ptr,
    new_columns_ptr,
    stride_scores_row,
    stride_scores_class,
    stride_kept_row,
    stride_kept_slot,
    stride_columns_row,
    stride_columns_slot,
    num_classes,
    k,
    first_class,
    LOG_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    WIDTH: tl.constexpr = 2**LOG_WIDTH
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, WIDTH)
    offs_slot = slots.to(tl.int64)
    kept = tl.load(
        kept_ptr + row * stride_kept_row + offs_slot * stride_kept_slot,
        mask=slots < k,
        other=float("-inf"),
    )
    columns = tl.load(
        columns_ptr + row * stride_columns_row + offs_slot * stride_columns_slot,
        mask=slots < k,
        other=-1,
    )
    held = pack(ordered_bits(kept), columns.to(tl.int32))
    best = tl.where(columns < 0, EMPTY_KEY, held)
    floor = _kth_key(best, k, slots)

    # Lane j of a block of classes holds every WIDTH-th score from the j-th on.
    groups = tl.arange(0, GROUPS)[:, None]
    offs_block = groups * WIDTH + slots[None, :]
    scores_ptr += row * stride_scores_row
    for start in range(0, num_classes, GROUPS * WIDTH):
        offs_class = start + offs_block
        mask_class = offs_class < num_classes
        scores = tl.load(
            scores_ptr + offs_class.to(tl.int64) * stride_scores_class,
            mask=mask_class,
            other=float("-inf"),
        )
        ordered = tl.where(mask_class, ordered_bits(scores.to(tl.float32)), TAKEN)
        # Most blocks hold nothing that can enter, and end here.
        if tl.max(ordered) >= (floor >> 32).to(tl.int32):
            found, group = _lane_maxima(ordered, first_class + start, slots, WIDTH)
            while tl.max(found, axis=0) > floor:
                # The larger of the i-th largest and the i-th smallest are the largest half.
                best = tl.maximum(best, sort(found, LOG_WIDTH, 0))
                best = sort_bitonic(best, LOG_WIDTH, LOG_WIDTH, 1)
                best = tl.where(slots < k, best, EMPTY_KEY)
                floor = _kth_key(best, k, slots)
                ordered = tl.where(groups == group[None, :], TAKEN, ordered)
                found, group = _lane_maxima(ordered, first_class + start, slots, WIDTH)

    columns = unpack_classes(best).to(tl.int64)
    offs_out = row * k + offs_slot
    tl.store(new_kept_ptr + offs_out, unpack_scores(best), mask=slots < k)
    tl.store(new_columns_ptr + offs_out, tl.where(columns == NO_CLASS, -1, columns), mask=slots < k)


def list_width(k: int) -> int:
    """Return the slots of the list that holds k scores."""
    return min(width for width in GROUPS if width >= k)


def merge_top_k(
    scores: Tensor, first_class: int, kept: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the k largest of the scores and of what is kept, from the largest down.

    Of equal scores the lowest classes stay, and come first, in whatever order the tiles come. An
    empty slot is (-inf, -1), and these come last; a score of -inf fills a slot that would be
    empty. A row with NaN keeps a NaN. Every row is one program of one warp: it doesn't depend on
    the other rows, and is the same in every run. A block of classes without a score above the
    k-th largest costs one comparison for each score; about k (1 + log(V / k)) are above it when
    they come, in random order.

    Args:
        scores: [n, m] tile of float32, float16 or bfloat16, any strides; column j is class
            first_class + j.
        first_class: number of classes before the tile; ids are below 2^31 - 1.
        kept: [n, k] float32, k from 1 to MAX_K: of the last call, or all -inf.
        columns: [n, k] int64, its classes, none of them in this tile; or all -1.

    Returns:
        New kept [n, k] float32 and columns [n, k] int64.
    """
    (num_rows, num_classes), k = scores.shape, kept.shape[1]
    assert 1 <= k <= MAX_K, k
    assert scores.dtype in (torch.float32, torch.float16, torch.bfloat16), scores.dtype
    assert kept.dtype == torch.float32, kept.dtype
    new_kept = torch.empty_like(kept, memory_format=torch.contiguous_format)
    new_columns = torch.empty_like(columns, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return new_kept, new_columns
    width = list_width(k)
    scores = kernel_input(scores)
    _merge_top_k_kernel[(num_rows,)](
        scores_ptr=scores,
        kept_ptr=kept,
        columns_ptr=columns,
        new_kept_ptr=new_kept,
        new_columns_ptr=new_columns,
        stride_scores_row=scores.stride(0),
        stride_scores_class=scores.stride(1),
        stride_kept_row=kept.stride(0),
        stride_kept_slot=kept.stride(1),
        stride_columns_row=columns.stride(0),
        stride_columns_slot=columns.stride(1),
        num_classes=num_classes,
        k=k,
        first_class=first_class,
        LOG_WIDTH=width.bit_length() - 1,
        GROUPS=GROUPS[width],
        **LAUNCH.options(),
    )
    return new_kept, new_columns
