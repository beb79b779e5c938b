"""The memory that the Triton forward pass fills: the output, and what the backward pass needs."""

import torch
from torch import Tensor

from sparseformer.kernels.common.launch import cdiv
from sparseformer.kernels.entmax_attention.arguments import Arguments, Saved
from sparseformer.kernels.entmax_attention.blocks import Blocks, blocks_for

WORD = 32


def input_dtype(arguments: Arguments) -> torch.dtype:
    """Return the dtype that query, key and value are read in; they may differ under autocast."""
    query, key, value = arguments[:3]
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)


def tile_blocks(arguments: Arguments) -> Blocks:
    """Return the tile that the bits of `Saved.tiles` stand for."""
    dims = arguments.query.shape[3], arguments.value.shape[3]
    return blocks_for(input_dtype(arguments), *dims)


def empty_saved(arguments: Arguments, keep: bool, blocks: Blocks | None = None) -> Saved:
    """Return unset memory for what the backward pass needs, empty without keep.

    Returns:
        rows: t, [B, Hq, Lq, 1], fp32 (float64 for float64 inputs).
        direction: sum u v / sum u, [B, Hq, Lq, Dv] in the dtype of the inputs.
        tiles: int32 [B, Hq, query blocks, words].
    """
    query, dtype = arguments.query, input_dtype(arguments)
    wide = torch.promote_types(dtype, torch.float32)
    if not keep:
        rows = query.new_empty((*query.shape[:3], 0), dtype=wide)
        return Saved(rows, rows.new_empty(0, dtype=dtype), rows.new_empty(0, dtype=torch.int32))
    shape = (*query.shape[:3], arguments.value.shape[3])
    return Saved(
        query.new_empty((*query.shape[:3], 1), dtype=wide),
        query.new_empty(shape, dtype=dtype),
        empty_tiles(arguments, blocks or tile_blocks(arguments)),
    )


def empty_tiles(arguments: Arguments, blocks: Blocks) -> Tensor:
    """Return unset words with a bit for each tile of scores."""
    query, num_keys = arguments.query, arguments.key.shape[2]
    words = cdiv(cdiv(num_keys, blocks.keys), WORD)
    shape = (*query.shape[:2], cdiv(query.shape[2], blocks.queries), words)
    return query.new_empty(shape, dtype=torch.int32)
