"""Device functions of the forward pass: what a block of queries sees, and bits of its tiles."""

import triton
import triton.language as tl


@triton.jit
def load_bounds(rows_ptr, offs_m, num_queries, num_keys):
    """Return the first key that each query of a block sees, and one past the last one."""
    mask_m = offs_m < num_queries
    first = tl.load(rows_ptr + offs_m, mask=mask_m, other=num_keys)
    end = tl.load(rows_ptr + num_queries + offs_m, mask=mask_m, other=0)
    return first, end


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
def lowest_bit(word):
    """Return the index of the lowest set bit of an int32 word that isn't 0."""
    bit = (word & -word).to(tl.uint32, bitcast=True)
    # The conversion of a power of two is exact, and its exponent is the index.
    return (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
