"""The kernel that collects what entmax can reach holds exactly those classes, tile by tile."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from loss_kernel_case import NONE, Guarded, between_nan, draw, far_matrices
from torch import Tensor

from sparseformer.kernels.sparse_loss import selection
from sparseformer.kernels.sparse_loss.candidates_kernel import collect


@dataclass
class Buffers:
    """What a call updates, between guard bands."""

    num_rows: int
    room: int
    guarded: Guarded = field(default_factory=Guarded)

    def __post_init__(self) -> None:
        shape = (self.num_rows, self.room)
        self.top = self.guarded.like(torch.full(shape[:1], NONE))
        self.values = self.guarded.like(torch.full(shape, NONE))
        self.columns = self.guarded.like(torch.full(shape, -1))
        self.counts = self.guarded.like(torch.zeros(shape[0], dtype=torch.int32))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.top, self.values, self.columns, self.counts

    def add(self, tile: Tensor, first: int, reach: float | Tensor) -> None:
        top, *rest = self.tensors
        collect(tile, first, top, reach, *rest)
        self.guarded.check()

    def check(self, scores: Tensor, reach: float | Tensor) -> None:
        """Hold what is there to the definition, over the classes so far; not rows that overflow."""
        scores = scores.float()
        top = scores.amax(-1)
        assert torch.equal(self.top, top)
        # One step below the difference, which may have been rounded up.
        floor = torch.nextafter(top - reach, top.new_tensor(NONE))
        found = scores > floor[:, None]
        for row in range(self.num_rows):
            places = found[row].nonzero()[:, 0]
            count = places.numel()
            if int(self.counts[row]) > self.room:
                assert count > self.room
                continue
            assert int(self.counts[row]) == count
            assert self.columns[row].tolist() == places.tolist() + [-1] * (self.room - count)
            assert torch.equal(self.values[row, :count], scores[row, places])
            assert bool((self.values[row, count:] == NONE).all())


def collected(scores: Tensor, reach: float | Tensor, tile: int, room: int) -> Buffers:
    buffers = Buffers(scores.shape[0], room)
    for first in range(0, scores.shape[1], tile):
        part = between_nan(scores[:, first : first + tile])
        buffers.add(part, first, reach)
        buffers.check(scores[:, : first + part.shape[1]], reach)
    return buffers


@pytest.mark.parametrize(
    ("num_classes", "tile", "reach"),
    [
        (1, 1, 2.0),
        (2, 1, 0.5),
        (2, 2, 2.0),
        (5, 2, torch.inf),
        (7, 3, 1.0),
        (255, 254, 2.0),
        (256, 256, 1.0),
        (257, 64, 4.0),
        (257, 258, 10.0),
        (1000, 257, 2.0),
        (1000, 999, 1.0),
        (1025, 1025, torch.inf),
        (2600, 1500, 5.0),
    ],
    ids=str,
)
def test_holds_every_class_in_reach(num_classes: int, tile: int, reach: float) -> None:
    scores = draw(3, num_classes, seed=num_classes)
    buffers = collected(scores, reach, tile, num_classes)
    assert bool((buffers.counts <= num_classes).all())


def test_every_row_has_its_own_reach() -> None:
    reach = torch.tensor([0.5, 1.0, 4.0, torch.inf])
    buffers = collected(draw(4, 100), reach, 40, 100)
    assert len(set(buffers.counts.tolist())) == 4


def test_a_score_out_of_reach_is_outside() -> None:
    scores = torch.tensor([[2.0, 0.9999999, 3.0, 1.0000001, 2.0]])
    assert collected(scores, 2.0, 2, 5).columns[0, :4].tolist() == [0, 2, 3, 4]


def test_rounding_loses_no_score_in_reach() -> None:
    """In float32, 1,000,003.5 - 1.7 is 1,000,001.8125, a score that is in reach itself."""
    scores = torch.tensor([[1_000_003.5, 1_000_001.8125, 1_000_001.625]])
    assert collected(scores, 1.7, 2, 3).columns[0].tolist()[:2] == [0, 1]


@pytest.mark.parametrize("scale", [1e4, 1e9, 3e38])
def test_large_scores_reach_their_own_maximum(scale: float) -> None:
    """In float32, 1e9 - 2 is 1e9: nothing is above a floor computed so."""
    scores = torch.tensor([[-1.0, 0.5, 1.0, 1.0, -0.5]]) * scale
    assert collected(scores, 2.0, 2, 5).columns[0, :3].tolist() == [2, 3, -1]


def test_equal_scores_all_stay() -> None:
    assert collected(torch.full((2, 50), -7.0), 1.0, 20, 50).counts.tolist() == [50, 50]


def test_what_a_later_maximum_excludes_makes_room() -> None:
    """Ten slots are enough for ten at the end, though thirty were in reach when they came."""
    scores = torch.cat([draw(2, 9).abs(), draw(2, 9).abs() + 9, draw(2, 9).abs() + 18], -1)
    assert collected(scores, 4.0, 9, 10).counts.tolist() == [9, 9]
    # Some of the first tile stay.
    scores = torch.tensor([[1.0, 9.0, 2.0, 7.5, 10.0, 3.0, 11.0, 9.5]])
    assert collected(scores, 3.0, 4, 5).columns[0].tolist() == [1, 4, 6, 7, -1]


def test_a_buffer_longer_than_a_block_is_compacted() -> None:
    scores = torch.cat([draw(1, 1500).abs(), torch.tensor([[5.0]])], -1)
    buffers = collected(scores, 4.0, 1500, 1501)
    assert 100 < int(buffers.counts) < 1500


def test_a_row_with_too_many_is_flagged_and_leaves_the_others_alone() -> None:
    scores = draw(4, 300) * 4
    scores[1] = 0.0
    buffers = collected(scores, 1.0, 120, 20)
    assert [count > 20 for count in buffers.counts.tolist()] == [False, True, False, False]


def test_a_flag_stays_while_lost_classes_may_count() -> None:
    buffers = Buffers(1, 4)
    buffers.add(torch.zeros(1, 6), 0, 2.0)
    assert int(buffers.counts) > 4
    # The classes at 0 are lost, and still in reach.
    buffers.add(torch.ones(1, 1), 6, 2.0)
    assert int(buffers.counts) > 4
    # This maximum leaves all of them behind.
    scores = torch.tensor([[3.5, 2.0]])
    buffers.add(scores, 7, 2.0)
    buffers.check(torch.cat([torch.zeros(1, 6), torch.ones(1, 1), scores], -1), 2.0)
    assert buffers.columns.tolist() == [[7, 8, -1, -1]]


def test_excluded_classes_are_never_candidates() -> None:
    scores = torch.full((3, 60), NONE)
    scores[1, 50], scores[2, ::3] = -1e38, draw(20)
    for reach in (2.0, torch.inf):
        assert collected(scores, reach, 25, 60).counts.tolist()[:2] == [0, 1]


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf], ids=str)
def test_a_bad_score_shows_in_the_maximum_and_empties_its_row(bad: float) -> None:
    scores = draw(3, 90)
    scores[1, 50] = bad
    buffers = Buffers(3, 90)
    for first in range(0, 90, 30):
        buffers.add(scores[:, first : first + 30], first, 2.0)
    assert buffers.top[1].isnan() if bad != torch.inf else buffers.top[1] == torch.inf
    assert int(buffers.counts[1]) == 0
    assert bool((buffers.columns[1] == -1).all())
    good = Buffers(2, 90)
    good.add(scores[::2], 0, 2.0)
    for ours, alone in zip(buffers.tensors, good.tensors, strict=True):
        assert torch.equal(ours[::2], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_scores_are_collected_in_float32(dtype: torch.dtype) -> None:
    collected(draw(2, 200).to(dtype), 1.5, 130, 200)


@pytest.mark.parametrize("layout", ["transposed", "every-third", "expanded"])
def test_any_strides_of_the_scores(layout: str) -> None:
    scores = draw(3, 100)
    if layout == "expanded":
        view = scores = scores[1].expand(3, -1)
    else:
        view = between_nan(scores, 3, transposed=layout == "transposed")
    assert not view.is_contiguous()
    buffers = Buffers(3, 100)
    buffers.add(view, 0, 2.0)
    buffers.check(scores, 2.0)


def test_offsets_past_2_to_the_31_elements(tmp_path: Path) -> None:
    for scores in far_matrices(tmp_path):
        scores.copy_(draw(*scores.shape))
        buffers = Buffers(scores.shape[0], 20)
        buffers.add(scores, 0, 2.0)
        buffers.check(scores, 2.0)


def test_a_row_alone_equals_the_row_in_its_batch() -> None:
    scores = draw(4, 300)
    batch = collected(scores, 2.0, 128, 90)
    for row in (0, 3):
        alone = collected(scores[row : row + 1], 2.0, 128, 90)
        for ours, theirs in zip(batch.tensors, alone.tensors, strict=True):
            assert torch.equal(ours[row], theirs[0])


def test_agrees_with_the_twin_where_rows_overflow_and_recover() -> None:
    scores = draw(5, 200)
    scores[:, 100:150] += torch.arange(5.0)[:, None]
    ours, twin = Buffers(5, 12), Buffers(5, 12)
    flags = set()
    for first in range(0, 200, 50):
        tile = scores[:, first : first + 50]
        ours.add(tile, first, 1.2)
        top, *rest = twin.tensors
        selection.collect(tile, first, top, 1.2, *rest)
        assert torch.equal(ours.top, twin.top)
        assert torch.equal(ours.counts, twin.counts)
        held = ours.counts <= 12
        assert torch.equal(ours.values[held], twin.values[held])
        assert torch.equal(ours.columns[held], twin.columns[held])
        flags |= set(held.tolist())
    assert flags == {False, True}


def test_no_rows_no_classes_and_no_slots() -> None:
    Buffers(2, 3).add(torch.zeros(2, 0), 0, 1.0)
    collect(torch.zeros(0, 4), 0, *_plain(0, 3))
    top, reach, values, columns, counts = _plain(2, 0)
    collect(torch.zeros(2, 4), 0, top, reach, values, columns, counts)
    assert counts.tolist() == [4, 4]


def _plain(num_rows: int, room: int) -> tuple[Tensor, float, Tensor, Tensor, Tensor]:
    top, values = torch.full((num_rows,), NONE), torch.full((num_rows, room), NONE)
    columns, counts = torch.full((num_rows, room), -1), torch.zeros(num_rows, dtype=torch.int32)
    return top, 1.0, values, columns, counts
