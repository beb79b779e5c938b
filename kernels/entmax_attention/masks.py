"""Which keys a query sees, and how a score matrix is cut into blocks of bounded size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# 2 MiB of fp32 scores: the buffers of a block stay in the cache of one core, and blocks
# are still large enough that the overhead of a call does not show (measured: 2**15 to 2**22).
CHUNK_ELEMENTS = 1 << 19
# Further than any key: a side of the band that is not limited.
UNLIMITED = 1 << 40
MIN_WINDOW_ROWS = 64


class Segment(NamedTuple):
    """One sequence pair: queries [q_start, q_end) look at keys [k_start, k_end)."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int

    @property
    def diagonal(self) -> int:
        """The offset j - i between the last query and the last key."""
        return self.k_end - self.q_end


class Block(NamedTuple):
    """A rectangle of the score matrix that is computed at once."""

    batch: slice
    queries: slice
    keys: slice
    diagonal: int
    bias_start: int  # entry of relative_bias that belongs to the last query and the first key


@dataclass(frozen=True)
class AttentionParams:
    """What one call of attention is, beside its tensors.

    Query i sees keys j with diagonal - left <= j - i <= diagonal + right, where the diagonal
    ends at the last query and the last key of a segment.
    """

    scale: float
    segments: tuple[Segment, ...]
    left: int = UNLIMITED
    right: int = UNLIMITED
    dropout_p: float = 0.0
    seed: int = 0
    chunk_elements: int = CHUNK_ELEMENTS


class Padding(NamedTuple):
    """Batch row b offers keys start[b] <= j < end[b]; both int64 [B]."""

    start: Tensor
    end: Tensor


def plan_blocks(query: Tensor, params: AttentionParams) -> Iterator[Block]:
    """Cut the visible part of the scores into blocks of about params.chunk_elements.

    Rows whose band holds no key are left out. Many small problems share a block; a large one
    is cut along its queries only, so a row is never split.
    """
    batch, heads, num_queries = query.shape[:3]
    for segment in params.segments:
        first = max(segment.q_start, segment.k_start - segment.diagonal - params.right)
        if first >= segment.q_end or segment.k_start == segment.k_end or not batch * heads:
            continue
        rows = _rows_per_block(heads, segment.q_end - first, segment, params)
        per_batch = heads * rows * (segment.k_end - segment.k_start)
        whole = rows == segment.q_end - first
        batches = max(1, params.chunk_elements // per_batch) if whole else 1
        for b in range(0, batch, batches):
            for i in range(first, segment.q_end, rows):
                queries = slice(i, min(i + rows, segment.q_end))
                examples = slice(b, min(b + batches, batch))
                yield _block(examples, queries, segment, params, num_queries)


def _rows_per_block(heads: int, num_rows: int, segment: Segment, params: AttentionParams) -> int:
    num_keys = segment.k_end - segment.k_start
    rows = max(1, params.chunk_elements // (heads * num_keys))
    band = params.left + params.right + 1
    if band < num_keys:
        # R rows of a band of W keys span R + W keys, so tall blocks waste work.
        rows = min(rows, max(MIN_WINDOW_ROWS, band))
    return min(rows, num_rows)


def _block(
    batch: slice, queries: slice, segment: Segment, params: AttentionParams, num_queries: int
) -> Block:
    diagonal = segment.diagonal
    k_first = max(segment.k_start, queries.start + diagonal - params.left)
    k_end = min(segment.k_end, queries.stop + diagonal + params.right)
    shift = segment.k_start - segment.q_start
    bias_start = k_first - (queries.stop - 1) - shift + num_queries - 1
    return Block(batch, queries, slice(k_first, k_end), diagonal, bias_start)


def band_mask(block: Block, params: AttentionParams, like: Tensor) -> Tensor | None:
    """Return 0 where a query of the block sees a key, else -inf, [R, K]; None if all see all."""
    low, high = block.diagonal - params.left, block.diagonal + params.right
    queries, keys = block.queries, block.keys
    if low <= keys.start - (queries.stop - 1) and keys.stop - 1 - queries.start <= high:
        return None
    offset = _indices(keys, like) - _indices(queries, like)[:, None]
    hidden = (offset < low) | (offset > high)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)


def padded_keys(padding: Padding, num_keys: int) -> Tensor:
    """Mark the keys that no query may see, bool [B, Lk]."""
    index = torch.arange(num_keys, device=padding.start.device)
    return (index < padding.start[:, None]) | (index >= padding.end[:, None])


def rows_without_keys(padding: Padding, params: AttentionParams) -> Tensor:
    """Mark the queries whose band and padding leave no key, bool [B, Lq]."""
    (segment,) = params.segments
    centre = torch.arange(segment.q_end, device=padding.start.device) + segment.diagonal
    low = torch.maximum(padding.start[:, None], (centre - params.left).clamp_min(0))
    high = torch.minimum(padding.end[:, None], (centre + params.right + 1).clamp_max(segment.k_end))
    return low >= high


def dropout_keep(block: Block, params: AttentionParams, shape: torch.Size, like: Tensor) -> Tensor:
    """Draw which probabilities of a block dropout keeps, bool [nb, Hq, R, K].

    Entry n = ((b * Hq + h) * Lq + i) * Lk + j of the whole score matrix is kept if the n-th
    output of SplitMix64 (Steele et al. 2014; without its last shift, which the comparison
    can't see) lies below 1 - dropout_p. So the draw depends on the position, not on the blocks.

    Args:
        block: the rectangle to draw.
        params: its seed and dropout_p.
        shape: the sizes [B, Hq, Lq, Lk] of the whole score matrix.
        like: gives the device.
    """
    _, heads, num_queries, num_keys = shape
    row = _indices(block.batch, like)[:, None, None] * heads
    row = (row + _indices(slice(0, heads), like)[:, None]) * num_queries
    row = row + _indices(block.queries, like)
    entry = (row * num_keys)[..., None] + _indices(block.keys, like)
    state = entry.mul_(_signed(0x9E3779B97F4A7C15)).add_(params.seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # torch shifts signed integers arithmetically, so the copies of the sign are cut off.
        shifted = (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        state = state.bitwise_xor_(shifted).mul_(_signed(factor))
    return state < keep_bound(params.dropout_p)


def keep_bound(dropout_p: float) -> int:
    """Return the int64 that the draws which dropout keeps lie below."""
    return min(int((1.0 - dropout_p) * 2.0**64) - 2**63, 2**63 - 1)


def _indices(part: slice, like: Tensor) -> Tensor:
    return torch.arange(part.start, part.stop, device=like.device)


def _signed(value: int) -> int:
    """Read the 64 bits of value as a signed integer; torch's int64 wraps around."""
    return value - (1 << 64) if value >> 63 else value
