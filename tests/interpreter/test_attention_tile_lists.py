"""What the backward kernels read beside tensors: lists of active tiles, bounds of queries."""

import pytest
import torch
from attention_backward_case import BackwardCase, pack_bits

from sparseformer.kernels.entmax_attention import tile_lists
from sparseformer.kernels.entmax_attention.row_bounds import common_keys, row_bounds
from sparseformer.kernels.entmax_attention.tile_lists import list_active_tiles

SIZES = {"one": (1, 1), "word": (3, 32), "wide": (2, 70), "tall": (70, 2)}
MASKS = {
    "none": BackwardCase(),
    "causal": BackwardCase(is_causal=True),
    "causal-more-queries": BackwardCase(queries=35, keys=17, is_causal=True),
    "window": BackwardCase(window=(3, 0)),
    "padding": BackwardCase(batch=3, start=(0, 37, 3), length=(3, 37, 40), is_causal=True),
    "packed": BackwardCase(
        queries=30,
        keys=53,
        packed_q=(0, 3, 3, 21, 22, 30),
        packed_k=(0, 20, 24, 41, 41, 53),
        window=(4, 2),
    ),
}


@pytest.mark.parametrize("by_key", [False, True], ids=["by-query", "by-key"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_lists_hold_the_active_tiles_in_rising_order(
    sizes: tuple[int, int], by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_lists, "CHUNK", 32)
    draw = torch.Generator().manual_seed(1)
    active = torch.rand(1, 2, *sizes, generator=draw) < 0.4
    lists = list_active_tiles(pack_bits(active), sizes[1], by_key)
    owners = (active.mT if by_key else active).flatten(0, 1)
    assert torch.equal(lists.counts, owners.sum(2, dtype=torch.int32))
    for head, owner in ((0, 0), (1, owners.shape[1] - 1), (1, owners.shape[1] // 2)):
        expected = owners[head, owner].nonzero().flatten()
        assert torch.equal(lists.tiles[head, owner, : len(expected)].long(), expected)


@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS)
def test_bounds_are_the_visible_keys(case: BackwardCase) -> None:
    bounds = row_bounds(case.arguments())
    keys = torch.arange(case.keys)
    first, end = bounds.rows[:, 0, :, None], bounds.rows[:, 1, :, None]
    visible = case.visible()
    assert torch.equal(((keys >= first) & (keys < end)).expand_as(visible[:, 0]), visible[:, 0])
    assert (bounds.rows.shape[0] > 1) == bool(bounds.batch_stride())


@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS)
def test_spans_hold_every_visible_pair(case: BackwardCase) -> None:
    spans = row_bounds(case.arguments()).spans
    visible = case.visible()[:, 0]
    keys, queries = torch.arange(case.keys), torch.arange(case.queries)
    seen = (keys >= spans[:, :1]) & (keys < spans[:, 1:2])
    sees = (queries >= spans[:, 2:3]) & (queries < spans[:, 3:])
    assert not (visible & ~seen[:, None]).any()
    assert not (visible & ~sees[:, :, None]).any()
    # The first and the last query of the span see something, so it is no longer than needed.
    for row, span in zip(visible.any(2), spans.expand(len(visible), 4).tolist(), strict=True):
        assert not row.any() or (row[span[2]] and row[span[3] - 1])


@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS)
def test_common_keys_are_seen_by_every_query_of_a_block(case: BackwardCase) -> None:
    common = common_keys(row_bounds(case.arguments()), 16)
    for index, rows in enumerate(case.visible()[:, 0].split(16, dim=1)):
        start, end = common[:, index, 0, None], common[:, index, 1, None]
        keys = torch.arange(case.keys)
        assert torch.equal(((keys >= start) & (keys < end)).expand(len(rows), -1), rows.all(1))
