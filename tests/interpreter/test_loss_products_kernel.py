"""The kernels of the sparse products equal dense float64 products, and read no absent entry."""

from pathlib import Path

import pytest
import torch
from loss_kernel_case import Guarded, between_nan, draw, far_matrices, guarded_allocations
from torch import Tensor

from sparseformer.kernels.sparse_loss import products
from sparseformer.kernels.sparse_loss.products_kernel import gather_scale, segment_sum
from sparseformer.testing import assert_close_to_reference

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def dense(columns: Tensor, coefficients: Tensor, num_classes: int) -> Tensor:
    """Return the matrix [n, V] that the slots stand for, in float64."""
    matrix = torch.zeros(columns.shape[0], num_classes + 1, dtype=torch.float64)
    matrix.scatter_add_(1, columns.long() % (num_classes + 1), coefficients.double())
    return matrix[:, :num_classes]


def slots(num_rows: int, num_slots: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return columns, some of them -1, and coefficients, some of them 0."""
    columns = integers(-1, num_classes, num_rows, num_slots)
    coefficients = draw(num_rows, num_slots, seed=num_slots)
    return columns, coefficients * (integers(0, 5, num_rows, num_slots) > 0)


def entries(count: int, num_rows: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, ascending columns from -1 to V (both of them none), and values."""
    columns = integers(-1, num_classes + 1, count).sort().values
    return integers(0, num_rows, count), columns, draw(count, seed=count)


def transposed_product(
    rows: Tensor, columns: Tensor, values: Tensor, hidden: Tensor, out: Tensor
) -> Tensor:
    """Return out plus the segment sums, in float64."""
    sums = torch.zeros(out.shape[0] + 2, out.shape[1], dtype=torch.float64)
    sums.index_add_(0, columns.long() + 1, values.double()[:, None] * hidden.double()[rows.long()])
    return out.double() + sums[1:-1]


@pytest.mark.parametrize(
    ("num_rows", "num_slots", "num_classes", "width"),
    [
        (1, 1, 1, 1),
        (3, 5, 7, 16),
        (2, 8, 11, 33),
        (4, 65, 50, 100),
        (2, 9, 20, 512),
        (2, 3, 5, 513),
        (2, 17, 6, 1030),
    ],
    ids=str,
)
def test_gathers_the_weighted_rows(
    num_rows: int, num_slots: int, num_classes: int, width: int
) -> None:
    columns, coefficients = slots(num_rows, num_slots, num_classes)
    weight = draw(num_classes, width)
    with guarded_allocations():
        result = gather_scale(columns, coefficients, between_nan(weight))
    matrix = dense(columns, coefficients, num_classes)
    baseline = products.gather_scale(columns, coefficients * (columns >= 0), weight)
    assert_close_to_reference(result, matrix @ weight.double(), baseline)


@DTYPES
def test_gathers_from_any_dtype_in_float32(dtype: torch.dtype) -> None:
    columns, coefficients = slots(3, 20, 30)
    weight = draw(30, 40).to(dtype)
    result = gather_scale(columns.int(), coefficients, weight)
    assert result.dtype == torch.float32
    assert_close_to_reference(result, dense(columns, coefficients, 30) @ weight.double())


def test_gathers_through_any_strides() -> None:
    columns, coefficients = slots(4, 6, 9)
    weight = draw(9, 24)
    result = gather_scale(
        columns.T.contiguous().T,
        between_nan(coefficients, 3),
        between_nan(weight, 2, transposed=True),
    )
    assert torch.equal(result, gather_scale(columns, coefficients, weight))


def test_absent_slots_are_never_read() -> None:
    weight = torch.full((6, 5), torch.nan)
    weight[2] = 1.0
    columns = torch.tensor([[4, 2, -1, -1, 5, 2], [-1, 0, 1, 2**40, 5, 3]])
    coefficients = torch.tensor([[0.0, 2.0, torch.nan, 3.0, 0.0, 0.5], [torch.inf, 0, 0, 0, 0, 0]])
    assert torch.equal(gather_scale(columns, coefficients, weight)[0], torch.full((5,), 2.5))
    assert not gather_scale(columns, coefficients, weight)[1].any()


def test_a_coefficient_of_nan_shows() -> None:
    result = gather_scale(torch.tensor([[1], [0]]), torch.tensor([[torch.nan], [1.0]]), draw(2, 3))
    assert result[0].isnan().all()
    assert not result[1].isnan().any()


def test_gathers_past_2_to_the_31_elements(tmp_path: Path) -> None:
    for weight in far_matrices(tmp_path):
        weight.copy_(draw(*weight.shape))
        last = torch.tensor([[weight.shape[0] - 1]])
        result = gather_scale(last.int(), torch.ones(1, 1), weight)
        assert torch.equal(result, weight[-1:].float())
    coefficients = far_matrices(tmp_path)[0].copy_(draw(3, 20))
    columns, weight = integers(0, 5, 3, 20), draw(5, 8)
    near = gather_scale(columns, coefficients.contiguous(), weight)
    assert torch.equal(gather_scale(columns, coefficients, weight), near)


def test_a_row_alone_gathers_as_in_its_batch() -> None:
    columns, coefficients = slots(5, 33, 20)
    weight = draw(20, 70)
    result = gather_scale(columns, coefficients, weight)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(gather_scale(columns[one], coefficients[one], weight), result[one])


@pytest.mark.parametrize(
    ("count", "num_rows", "num_classes", "width"),
    [
        (1, 1, 1, 1),
        (20, 3, 5, 16),
        (8, 4, 30, 33),
        (200, 7, 3, 40),
        (40, 6, 12, 512),
        (30, 5, 4, 1030),
    ],
    ids=str,
)
def test_adds_the_sum_of_each_class(
    count: int, num_rows: int, num_classes: int, width: int
) -> None:
    rows, columns, values = entries(count, num_rows, num_classes)
    hidden, before = draw(num_rows, width), draw(num_classes, width, seed=1)
    guarded = Guarded()
    out, baseline = guarded.like(before), torch.cat([before, before[:1]])
    segment_sum(rows, columns, values, between_nan(hidden), out)
    guarded.check()
    products.segment_sum(rows, columns, values, hidden, baseline)
    expected = transposed_product(rows, columns, values, hidden, before)
    assert_close_to_reference(out, expected, baseline[:-1], kind="gradient")
    untouched = ~torch.isin(torch.arange(num_classes), columns)
    assert torch.equal(out[untouched], before[untouched])


@DTYPES
def test_adds_from_any_dtype_in_float32(dtype: torch.dtype) -> None:
    rows, columns, values = entries(60, 5, 9)
    hidden, out = draw(5, 20).to(dtype), torch.zeros(9, 20)
    segment_sum(rows.int(), columns.int(), values, hidden, out)
    expected = transposed_product(rows, columns, values, hidden, torch.zeros(9, 20))
    assert_close_to_reference(out, expected, kind="gradient")


def test_adds_through_any_strides() -> None:
    rows, columns, values = entries(30, 4, 6)
    hidden, before = draw(4, 10), draw(6, 10, seed=3)
    contiguous, strided = before.clone(), between_nan(before, 3, transposed=True)
    segment_sum(rows, columns, values, hidden, contiguous)
    spread = torch.stack([rows, rows + 99, rows], 1).flatten()[::3]
    segment_sum(spread, columns, values.repeat_interleave(2)[::2], between_nan(hidden, 2), strided)
    assert torch.equal(strided, contiguous)


def test_absent_entries_are_never_read() -> None:
    hidden = torch.full((4, 3), torch.nan)
    hidden[1] = 2.0
    rows = torch.tensor([0, 2**40, 1, 3, 1, 0])
    columns = torch.tensor([-1, -1, 0, 0, 2, 3])
    out = torch.zeros(3, 3)
    segment_sum(rows, columns, torch.tensor([1.0, 1.0, 0.5, 0.0, 4.0, 1.0]), hidden, out)
    assert out.tolist() == [[1.0] * 3, [0.0] * 3, [8.0] * 3]


def test_column_sums_are_a_product_with_ones() -> None:
    rows, columns, values = entries(50, 6, 8)
    out = torch.zeros(8)
    segment_sum(rows, columns, values, values.new_ones(1, 1).expand(6, 1), out[:, None])
    ones = torch.ones(6, 1, dtype=torch.float64)
    expected = transposed_product(rows, columns, values, ones, torch.zeros(8, 1))
    assert_close_to_reference(out, expected[:, 0], kind="gradient")


def test_adds_past_2_to_the_31_elements(tmp_path: Path) -> None:
    far = zip(far_matrices(tmp_path), far_matrices(tmp_path, torch.float32), strict=True)
    for hidden, out in far:
        hidden.copy_(draw(*hidden.shape))
        out.fill_(1.0)
        last = torch.tensor([hidden.shape[0] - 1], dtype=torch.int32)
        segment_sum(last, last, torch.ones(1), hidden, out)
        assert torch.equal(out[-1], 1.0 + hidden[-1].float())


def test_no_entries_and_no_features() -> None:
    assert gather_scale(torch.zeros(0, 3).long(), torch.zeros(0, 3), draw(4, 5)).shape == (0, 5)
    assert not gather_scale(torch.zeros(2, 0).long(), torch.zeros(2, 0), draw(4, 5)).any()
    out = draw(4, 5)
    before = out.clone()
    none = torch.zeros(0, dtype=torch.long)
    segment_sum(none, none, torch.zeros(0), draw(2, 5), out)
    assert torch.equal(out, before)
