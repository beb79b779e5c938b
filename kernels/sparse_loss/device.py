"""Device functions of the loss kernels: sortable keys of scores, bitonic sorting, gathered sums."""

import triton
import triton.language as tl

# The class id of a slot that holds nothing, inside a key; a real class id is smaller.
NO_CLASS = tl.constexpr(2**31 - 1)
# The key of such a slot: below every score, -inf included.
EMPTY_KEY = tl.constexpr(-2_139_095_041 * 2**32)
LARGEST_KEY = tl.constexpr(2**63 - 1)


@triton.jit
def ordered_bits(scores):
    """Return int32 that order as float32 scores do: 0 and -0 alike, NaN above everything."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, 0x7FC00000, bits)


@triton.jit
def from_ordered_bits(ordered):
    """Return the float32 scores that int32 from `ordered_bits` stand for."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(ordered, classes):
    """Return int64 keys that order by score, and of equal scores the lowest class first."""
    # For ids up to NO_CLASS, id ^ NO_CLASS is NO_CLASS - id.
    return (ordered.to(tl.int64) << 32) | (classes ^ NO_CLASS).to(tl.int64)


@triton.jit
def unpack_scores(keys):
    """Return the float32 scores of keys."""
    return from_ordered_bits((keys >> 32).to(tl.int32))


@triton.jit
def unpack_classes(keys):
    """Return the int32 class ids of keys, NO_CLASS in empty slots."""
    return (keys & NO_CLASS).to(tl.int32) ^ NO_CLASS


@triton.jit
def sort_bitonic(keys, LOG_WIDTH: tl.constexpr, LOG_RUN: tl.constexpr, DESCENDING: tl.constexpr):
    """Sort runs of 2^LOG_RUN keys in turn up and down; each run rises then falls, or reversed.

    With DESCENDING the first run is sorted downwards, else upwards.
    """
    for bit in tl.static_range(LOG_RUN - 1, -1, -1):
        # Pairs of keys whose places differ in this bit only, so that they meet in one thread.
        pairs = tl.reshape(keys, [2 ** (LOG_WIDTH - bit - 1), 2, 2**bit])
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        low, high = tl.minimum(first, second), tl.maximum(first, second)
        run = tl.arange(0, 2 ** (LOG_WIDTH - bit - 1)) >> (LOG_RUN - bit - 1)
        down = ((run & 1) != DESCENDING)[:, None]
        pairs = tl.join(tl.where(down, high, low), tl.where(down, low, high))
        keys = tl.reshape(tl.permute(pairs, (0, 2, 1)), [2**LOG_WIDTH])
    return keys


@triton.jit
def sort(keys, LOG_WIDTH: tl.constexpr, DESCENDING: tl.constexpr):
    """Sort keys [2^LOG_WIDTH] by a bitonic network.

    As tl.sort, which takes the interpreter a Python call for each pair of keys.
    """
    for log_run in tl.static_range(1, LOG_WIDTH + 1):
        keys = sort_bitonic(keys, LOG_WIDTH, log_run, DESCENDING)
    return keys


@triton.jit
def weighted_row_sum(
    index_ptr,
    values_ptr,
    dense_ptr,
    stride_index,
    stride_value,
    stride_dense_row,
    stride_dense_feature,
    begin,
    end,
    num_features,
    offs_feature,
    GROUP: tl.constexpr,
    BLOCK_FEATURE: tl.constexpr,
):
    """Return sum_e values[e] dense[index[e], offs_feature] over entries begin to end, in float32.

    Entries with the value 0 or a negative index are never read.
    """
    mask_feature = offs_feature < num_features
    offs_dense = offs_feature.to(tl.int64) * stride_dense_feature
    # One sum for each place of a group: their sum is made once, at the end.
    sums = tl.zeros([GROUP, BLOCK_FEATURE], tl.float32)
    for start in range(begin, end, GROUP):
        entries = start + tl.arange(0, GROUP)
        present = entries < end
        entries = entries.to(tl.int64)
        index = tl.load(index_ptr + entries * stride_index, mask=present, other=-1).to(tl.int64)
        values = tl.load(values_ptr + entries * stride_value, mask=present, other=0.0)
        values = values.to(tl.float32)
        present = (values != 0.0) & (index >= 0)
        dense = tl.load(
            dense_ptr + index[:, None] * stride_dense_row + offs_dense[None, :],
            mask=present[:, None] & mask_feature[None, :],
            other=0.0,
        )
        # A value without a row to read adds nothing, whatever it is.
        sums += tl.where(present, values, 0.0)[:, None] * dense.to(tl.float32)
    return tl.sum(sums, axis=0)
