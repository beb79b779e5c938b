"""From a bit per tile of scores to the list of tiles that a block of queries or keys visits."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, cdiv, next_power_of_2

WORD = 32
# Tiles that a program looks at together.
CHUNK = 1024
LAUNCH = Launch(num_warps=1)


class TileLists(NamedTuple):
    """The active tiles of every block of queries, or of keys, in rising order.

    Attributes:
        tiles: int16, or int32 where that is too short, [B * Hq, blocks, most tiles]; what lies
            beyond the count is unset.
        counts: int32 [B * Hq, blocks].
    """

    tiles: Tensor
    counts: Tensor


def list_active_tiles(bits: Tensor, num_key_blocks: int, by_key: bool) -> TileLists:
    """Return the key blocks that each query block visits, or with by_key the other way round.

    Args:
        bits: int32 [B, Hq, query blocks, words]; bit n % 32 of word n // 32 is set where the tile
            with key block n holds a probability above 0.
        num_key_blocks: how many bits count.
        by_key: list query blocks for each key block.
    """
    batch, heads, num_query_blocks, num_words = bits.shape
    owners, length = num_query_blocks, num_key_blocks
    if by_key:
        owners, length = length, owners
    dtype = torch.int16 if length < 1 << 15 else torch.int32
    tiles = bits.new_empty((batch * heads, owners, length), dtype=dtype)
    counts = bits.new_empty((batch * heads, owners))
    _list_active_tiles_kernel[(batch * heads * owners,)](
        bits_ptr=bits,
        tiles_ptr=tiles,
        counts_ptr=counts,
        owners=owners,
        length=length,
        num_query_blocks=num_query_blocks,
        num_words=num_words,
        BY_KEY=by_key,
        BLOCK=min(CHUNK, max(WORD, next_power_of_2(length))),
        **LAUNCH.options(),
    )
    return TileLists(tiles, counts)


def num_words(num_key_blocks: int) -> int:
    """Return the words that hold a bit for each key block."""
    return cdiv(num_key_blocks, WORD)


@triton.jit
def _list_active_tiles_kernel(
    bits_ptr,
    tiles_ptr,
    counts_ptr,
    owners,
    length,
    num_query_blocks,
    num_words,
    BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    head, owner = program // owners, program % owners
    bits_ptr += head.to(tl.int64) * num_query_blocks * num_words
    tiles_ptr += program.to(tl.int64) * length
    count = 0
    for start in range(0, length, BLOCK):
        members = start + tl.arange(0, BLOCK)
        if BY_KEY:
            word = members.to(tl.int64) * num_words + owner // 32
            place = owner % 32
        else:
            word = owner.to(tl.int64) * num_words + members // 32
            place = members % 32
        words = tl.load(bits_ptr + word, mask=members < length, other=0)
        is_active = (words >> place) & 1
        position = count + tl.cumsum(is_active, 0) - is_active
        value = members.to(tiles_ptr.dtype.element_ty)
        tl.store(tiles_ptr + position, value, mask=is_active != 0)
        count += tl.sum(is_active, 0)
    tl.store(counts_ptr + program, count)
