"""The sizes of a tile of scores, the same in the forward and the backward pass."""

from typing import NamedTuple

import torch

from sparseformer.kernels.common.launch import next_power_of_2


class Blocks(NamedTuple):
    """Queries and keys of one tile of scores; queries is a multiple of keys."""

    queries: int
    keys: int


def padded_dim(dim: int) -> int:
    """Return the columns that a tile of rows of this width takes: a power of 2, 16 or more."""
    return max(16, next_power_of_2(dim))


def blocks_for(dtype: torch.dtype, dim: int, value_dim: int) -> Blocks:
    """Return the tile that fits the registers of every supported GPU.

    Args:
        dtype: of query, key and value.
        dim: D.
        value_dim: Dv.
    """
    width = max(padded_dim(dim), padded_dim(value_dim))
    if dtype.itemsize > 2:
        return Blocks(32, 32) if width <= 64 else Blocks(16, 16)
    if width <= 64:
        return Blocks(64, 64)
    return Blocks(64, 32) if width <= 128 else Blocks(32, 32)
