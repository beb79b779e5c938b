"""The kernel that merges tiles into the k largest equals a stable sort of whole rows, exactly."""

from pathlib import Path

import pytest
import torch
from loss_kernel_case import NONE, between_nan, draw, far_matrices, guarded_allocations
from torch import Tensor

from sparseformer.kernels.sparse_loss import selection
from sparseformer.kernels.sparse_loss.topk_kernel import MAX_K, merge_top_k


def empty(num_rows: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.full((num_rows, k), NONE), torch.full((num_rows, k), -1)


def merged(scores: Tensor, k: int, tile: int, *, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Merge tiles of this many classes, each between NaN, and hold the guard bands."""
    kept, columns = empty(scores.shape[0], k)
    starts = range(0, scores.shape[1], tile)
    for first in reversed(starts) if backwards else starts:
        with guarded_allocations():
            part = between_nan(scores[:, first : first + tile])
            kept, columns = merge_top_k(part, first, kept, columns)
    return kept, columns


def expected(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort whole rows: a stable sort has the lowest of equal classes first."""
    values, columns = scores.float().sort(dim=-1, descending=True, stable=True)
    kept, slots = empty(scores.shape[0], k)
    kept[:, : scores.shape[1]], slots[:, : scores.shape[1]] = values[:, :k], columns[:, :k]
    return kept, slots


def check(actual: tuple[Tensor, Tensor], scores: Tensor, k: int) -> None:
    kept, columns = expected(scores, k)
    assert torch.equal(actual[0], kept)
    assert torch.equal(actual[1], columns)


@pytest.mark.parametrize(
    ("num_classes", "tile", "k"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (2, 2, 2),
        (5, 3, 2),
        (7, 4096, 8),
        (5, 2, 64),
        (255, 254, 8),
        (255, 255, 255),
        (256, 256, 64),
        (25, 3, 1),
        (257, 256, 65),
        (257, 258, 63),
        (1000, 999, 1),
        (600, 257, 64),
        (700, 500, MAX_K),
        (1100, 1100, 8),
    ],
    ids=str,
)
def test_equals_a_sort_of_the_whole_row(num_classes: int, tile: int, k: int) -> None:
    scores = draw(2, num_classes, seed=num_classes + k)
    check(merged(scores, k, tile), scores, k)


@pytest.mark.parametrize(("tile", "k"), [(120, 5), (50, 8), (17, 1), (70, 100)], ids=str)
@pytest.mark.parametrize("backwards", [False, True], ids=["in-order", "backwards"])
def test_ties_within_and_across_tiles_go_to_the_lowest_class(
    tile: int, k: int, backwards: bool
) -> None:
    scores = draw(2, 120, seed=tile).round()
    # 0 and -0 are equal.
    scores[1] = torch.where(scores[1] > 0, 0.0, -0.0)
    check(merged(scores, k, tile, backwards=backwards), scores, k)


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_sorted_rows_are_no_special_case(order: int) -> None:
    scores = (order * torch.arange(1100.0)).expand(1, -1)
    check(merged(scores, 20, 600), scores, 20)


def test_one_lane_with_every_large_score_is_emptied() -> None:
    scores = draw(1, 1024)
    scores[:, ::64] += 10.0
    check(merged(scores, 16, 1024), scores, 16)


def test_scores_of_any_size_keep_their_bits() -> None:
    tiny = torch.finfo(torch.float32).tiny
    scores = torch.tensor([[-3e38, 3e38, tiny, -tiny, 1e-45, -1e-45, 0.0, -1.0, 1.0, torch.inf]])
    check(merged(scores, 9, 3), scores, 9)


def test_excluded_scores_fill_only_what_would_be_empty() -> None:
    scores = torch.full((3, 90), NONE)
    scores[0, 70] = -1e38
    scores[1, ::2] = draw(45)
    check(merged(scores, 10, 50), scores, 10)
    check(merged(scores, 10, 50, backwards=True), scores, 10)


def test_nan_stays_in_its_row_and_leaves_the_others_alone() -> None:
    scores = draw(3, 120)
    scores[1, 33], scores[1, 80] = torch.nan, -torch.nan
    kept, columns = merged(scores, 4, 50)
    assert set(columns[1, :2].tolist()) == {33, 80}
    assert kept[1, :2].isnan().all()
    check((kept[::2], columns[::2]), scores[::2], 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_scores_are_kept_in_float32(dtype: torch.dtype) -> None:
    scores = draw(2, 200).to(dtype)
    scores[0, 3] = torch.finfo(dtype).max
    check(merged(scores, 8, 130), scores, 8)


@pytest.mark.parametrize("layout", ["transposed", "every-third", "expanded"])
def test_any_strides_of_every_operand(layout: str) -> None:
    scores = draw(3, 100)
    if layout == "expanded":
        view = scores = scores[1].expand(3, -1)
    else:
        view = between_nan(scores, 3, transposed=layout == "transposed")
    assert not view.is_contiguous()
    kept, columns = merge_top_k(view[:, :60], 0, *empty(3, 6))
    # Strided lists, as a caller's slices or transposes are.
    kept, columns = between_nan(kept, 2), columns.T.contiguous().T
    check(merge_top_k(view[:, 60:], 60, kept, columns), scores, 6)


def test_offsets_past_2_to_the_31_elements(tmp_path: Path) -> None:
    for scores in far_matrices(tmp_path):
        scores.copy_(draw(*scores.shape))
        k = min(4, scores.shape[1])
        check(merge_top_k(scores, 0, *empty(scores.shape[0], k)), scores, k)


def test_class_ids_reach_the_end_of_int32() -> None:
    first = 2**31 - 1 - 50
    kept, columns = merge_top_k(draw(1, 50), first, *empty(1, 5))
    assert torch.equal(kept, expected(draw(1, 50), 5)[0])
    assert torch.equal(columns, expected(draw(1, 50), 5)[1] + first)


def test_a_row_alone_equals_the_row_in_its_batch() -> None:
    scores = draw(3, 150)
    kept, columns = merged(scores, 20, 80)
    for row in (0, 2):
        alone = merged(scores[row : row + 1], 20, 80)
        assert torch.equal(alone[0][0], kept[row])
        assert torch.equal(alone[1][0], columns[row])


def test_agrees_with_the_twin() -> None:
    scores = draw(4, 150).round(decimals=1)
    ours, theirs = empty(4, 12), empty(4, 12)
    for first in range(0, 150, 70):
        tile = scores[:, first : first + 70]
        ours = merge_top_k(tile, first, *ours)
        theirs = selection.merge_top_k(tile, first, *theirs)
    columns, order = ours[1].sort(dim=-1)
    assert torch.equal(ours[0].gather(-1, order), theirs[0])
    assert torch.equal(columns, theirs[1])


def test_no_rows_and_no_classes() -> None:
    kept, columns = merge_top_k(torch.zeros(0, 5), 0, *empty(0, 3))
    assert kept.shape == columns.shape == (0, 3)
    before = expected(draw(2, 9), 3)
    assert all(map(torch.equal, merge_top_k(torch.zeros(2, 0), 9, *before), before))


@pytest.mark.parametrize(
    ("scores", "k"), [(torch.zeros(1, 4), MAX_K + 1), (torch.zeros(1, 4).double(), 2)]
)
def test_what_a_key_cannot_hold_is_refused(scores: Tensor, k: int) -> None:
    with pytest.raises(AssertionError):
        merge_top_k(scores, 0, *empty(1, k))
