"""How sparse the attention of a call was, counted block by block."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseformer.kernels.entmax_attention.masks import Block

TILE = 64


class AttentionStats(NamedTuple):
    """Sparsity of one call for each query head, fp32 [Hq]; NaN for a head that saw no key.

    Attributes:
        density: share of the visible query-key pairs with a probability above 0, in [0, 1].
        support_size: keys with a probability above 0, mean over the queries that see a key.
        entropy: -sum p log p in nats, mean over the queries that see a key.
        active_tiles: share of the 64 x 64 tiles of the [Lq, Lk] scores with a visible pair that
            also hold a probability above 0, in [0, 1].
    """

    density: Tensor
    support_size: Tensor
    entropy: Tensor
    active_tiles: Tensor


class StatsCollector:
    """Add up the counts of AttentionStats over the blocks of a call."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        batch, heads, num_queries, _ = query.shape
        counts = torch.zeros(4, heads, dtype=torch.float64, device=query.device)
        self._counts = counts
        self._pairs, self._support, self._rows, self._entropy = counts
        tiles = (batch, heads, math.ceil(num_queries / TILE), math.ceil(key.shape[2] / TILE))
        self._visible_tiles = torch.zeros(tiles, dtype=torch.bool, device=query.device)
        self._active_tiles = torch.zeros_like(self._visible_tiles)

    def add(self, block: Block, scores: Tensor, probs: Tensor) -> None:
        """Count one block; scores and probs [nb, Hq, R, K], before dropout."""
        visible, active = scores > -math.inf, probs > 0
        self._pairs += visible.sum((0, 2, 3))
        self._support += active.sum((0, 2, 3))
        self._rows += visible.any(-1).sum((0, 2))
        self._entropy += torch.special.entr(probs).sum((0, 2, 3))
        _mark_tiles(self._visible_tiles, block, visible)
        _mark_tiles(self._active_tiles, block, active)

    def result(self) -> AttentionStats:
        """Return the shares and means of what was counted."""
        return shares(self._counts, self._visible_tiles, self._active_tiles)


def shares(counts: Tensor, visible_tiles: Tensor, active_tiles: Tensor) -> AttentionStats:
    """Return the statistics of each head.

    Args:
        counts: [4, Hq], visible pairs, pairs with p > 0, queries that see a key, entropy.
        visible_tiles: bool [B, Hq, rows, columns], tiles of TILE x TILE with a visible pair.
        active_tiles: those that also hold a probability above 0.
    """
    pairs, support, rows, entropy = counts
    tiles = active_tiles.sum((0, 2, 3)) / visible_tiles.sum((0, 2, 3))
    values = (support / pairs, support / rows, entropy / rows, tiles)
    return AttentionStats(*(value.float() for value in values))


def _mark_tiles(tiles: Tensor, block: Block, marked: Tensor) -> None:
    """Set the tiles that hold a marked pair of a block."""
    (top, rows), (left, columns) = _tile_span(block.queries), _tile_span(block.keys)
    bottom = rows * TILE - top - marked.shape[2]
    right = columns * TILE - left - marked.shape[3]
    padded = F.pad(marked, (left, right, top, bottom))
    batch, heads = marked.shape[:2]
    found = padded.view(batch, heads, rows, TILE, columns, TILE).any(5).any(3)
    row, column = block.queries.start // TILE, block.keys.start // TILE
    tiles[block.batch, :, row : row + rows, column : column + columns] |= found


def _tile_span(part: slice) -> tuple[int, int]:
    """Return how far into a tile a slice starts, and how many tiles it touches."""
    first = part.start // TILE
    return part.start - first * TILE, math.ceil(part.stop / TILE) - first
