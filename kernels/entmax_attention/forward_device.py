"""Device functions of the forward pass: what a block of queries sees and tile scores."""

import triton
import triton.language as tl


@triton.jit
def load_bounds(rows_ptr, offs_m, num_queries, num_keys):
    """Return the first key, one past the last one, and the bias base of each query of a block."""
    mask_m = offs_m < num_queries
    first = tl.load(rows_ptr + offs_m, mask=mask_m, other=num_keys)
    end = tl.load(rows_ptr + num_queries + offs_m, mask=mask_m, other=0)
    base = tl.load(rows_ptr + 2 * num_queries + offs_m, mask=mask_m, other=0)
    return first, end, base


@triton.jit
def key_spans(first, end, num_keys):
    """Return low and high of the keys that some query of a block sees, and that every query sees.

    high is one past the last key. Rows past the last query see nothing.
    """
    sees = first < end
    low = tl.min(tl.where(sees, first, num_keys), 0)
    high = tl.max(tl.where(sees, end, 0), 0)
    return low, high, tl.max(first, 0), tl.min(end, 0)


@triton.jit
def tile_scores(
    query,
    key,
    scale,
    bias_ptr,
    first,
    end,
    bias_base,
    offs_n,
    is_whole,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return scale q k^T + bias, [BLOCK_M, BLOCK_N], -inf where a query doesn't see a key.

    Args:
        query: [BLOCK_M, BLOCK_D].
        key: [BLOCK_N, BLOCK_D].
        scale: of the scores.
        bias_ptr: the bias over offsets, read only with HAS_BIAS.
        first: the first key that each query sees, [BLOCK_M].
        end: one past the last one.
        bias_base: entry of the bias that belongs to key 0.
        offs_n: positions of the keys.
        is_whole: every query sees every key of the tile, so that no mask is needed.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=ACC) * scale
    keys = offs_n[None, :]
    if HAS_BIAS:
        visible = (keys >= first[:, None]) & (keys < end[:, None])
        scores += tl.load(bias_ptr + (bias_base[:, None] + keys), mask=visible, other=0.0)
        scores = tl.where(visible, scores, float("-inf"))
    else:
        if not is_whole:
            visible = (keys >= first[:, None]) & (keys < end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def lowest_bit(word):
    """Return the index of the lowest set bit of an int32 word that isn't 0."""
    bit = (word & -word).to(tl.uint32, bitcast=True)
    # The conversion of a power of two is exact, and its exponent is the index.
    return (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
