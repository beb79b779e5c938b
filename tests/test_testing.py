"""The tools of sparseformer.testing must bite: each is shown a mistake that it has to find."""

import math

import pytest
import torch

from sparseformer.testing import assert_close_to_reference, largest_tensor, poison_empty


def _reference() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(20, 30, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_rounding_passes(dtype: torch.dtype) -> None:
    expected = _reference()
    rounded = expected.to(dtype)
    assert_close_to_reference(rounded, expected)
    assert_close_to_reference(rounded, expected, rounded)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 3e-4), (torch.float16, 5e-2), (torch.bfloat16, 3e-1)],
    ids=["fp32", "fp16", "bf16"],
)
def test_one_wrong_entry_fails_and_is_named(dtype: torch.dtype, error: float) -> None:
    expected = _reference()
    actual = expected.to(dtype)
    actual[3, 7] += error
    with pytest.raises(AssertionError, match=r"at \(3, 7\): .* instead of"):
        assert_close_to_reference(actual, expected)


def test_the_baseline_sets_the_bound_by_kind() -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    baseline = torch.tensor([0.0, 0.0, 1e-3, 0.0])
    actual = torch.tensor([2.5e-3, 0.0, 0.0, 0.0])
    with pytest.raises(AssertionError, match=r"2.500e-03 > 2.000e-03 at \(0,\)"):
        assert_close_to_reference(actual, expected, baseline)
    assert_close_to_reference(actual, expected, baseline, kind="gradient")


def test_a_small_error_everywhere_fails_by_its_rms() -> None:
    expected = _reference()
    actual = (expected * (1 + 2e-5)).float()
    with pytest.raises(AssertionError, match="RMS"):
        assert_close_to_reference(actual, expected, (expected * (1 + 1e-3)).float())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf], ids=str)
def test_a_number_that_is_not_finite_fails_where_the_reference_is_finite(wrong: float) -> None:
    expected = _reference()
    actual = expected.float()
    actual[1, 1] = wrong
    with pytest.raises(AssertionError, match=r"at \(1, 1\)"):
        assert_close_to_reference(actual, expected)


def test_numbers_that_are_not_finite_must_agree() -> None:
    expected = _reference()
    expected[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert_close_to_reference(expected.float(), expected)
    actual = expected.float()
    actual[0, 1] = -math.inf
    with pytest.raises(AssertionError, match=r"at \(0, 1\)"):
        assert_close_to_reference(actual, expected)


def test_a_zero_reference_allows_no_error() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    assert_close_to_reference(torch.zeros(3), zeros)
    with pytest.raises(AssertionError, match=r"at \(2,\)"):
        assert_close_to_reference(torch.tensor([0.0, 0.0, 1e-30]), zeros)


def test_skipped_entries_are_few() -> None:
    expected = _reference()
    actual = expected.float()
    actual[0, 0] = 9.0
    skip = torch.zeros(20, 30, dtype=torch.bool)
    skip[0, 0] = True
    assert_close_to_reference(actual, expected, skip=skip)
    skip[:2] = True
    with pytest.raises(AssertionError, match=r"10\.0% of the entries skipped"):
        assert_close_to_reference(actual, expected, skip=skip)


def test_shapes_and_the_dtype_of_the_reference_are_checked() -> None:
    with pytest.raises(AssertionError, match=r"\[3\] vs \[2\]"):
        assert_close_to_reference(torch.zeros(3), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match=r"the reference is torch\.float32"):
        assert_close_to_reference(torch.zeros(3), torch.zeros(3))


def test_poison_shows_in_every_kind_of_empty_memory() -> None:
    like = torch.zeros(2, 3)
    with poison_empty():
        made = [
            torch.empty(2, 3),
            torch.empty_like(like),
            torch.empty_strided((2, 3), (3, 1)),
            like.new_empty(2, 3),
            like.new_empty_strided((2, 3), (3, 1)),
        ]
        integers, flags = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.bool)
        kept = torch.zeros(2) + torch.ones(2)
    assert all(bool(x.isnan().all()) for x in made)
    assert bool((integers == 2**31 - 1).all())
    assert bool(flags.all())
    assert torch.equal(kept, torch.ones(2))


def test_memory_is_not_poisoned_outside() -> None:
    with poison_empty():
        pass
    with largest_tensor() as gauge:
        torch.empty(5)
    assert gauge.operation == "empty"


def test_gauge_names_the_largest_tensor_of_forward_and_backward() -> None:
    x = torch.ones(8, 1, requires_grad=True)
    with largest_tensor() as gauge:
        (x * 2).sum()
    assert (gauge.numel, gauge.shape) == (8, (8, 1))
    with largest_tensor() as gauge:
        (x @ torch.ones(1, 50)).square().sum().backward()
    assert gauge.numel == 400
    assert gauge.shape == (8, 50)


def test_gauge_counts_the_memory_behind_an_expanded_view() -> None:
    with largest_tensor() as gauge:
        torch.ones(3, 1).expand(3, 1000)
    assert gauge.numel == 3
