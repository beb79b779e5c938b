"""Probabilities sum to 1 in the interpreted kernels of attention, up to 4096 keys.

The output where all values are 1 is that sum, in fp32, for equal scores, scores of std 0.05 and 1,
and rows with one heavy key. Longer rows are in tests/functional/test_attention_normalisation.py.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_backward_case import BackwardCase, forward_state
from attention_forward_case import counting, reference_output
from torch import Tensor

from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.forward import attention_forward
from sparseformer.kernels.entmax_attention.forward_output import refine_and_output
from sparseformer.kernels.entmax_attention.forward_problem import State, forward_problem
from sparseformer.kernels.entmax_attention.forward_sketch import sketch_thresholds
from sparseformer.kernels.entmax_attention.launch_table import rounding_of
from sparseformer.kernels.entmax_attention.pytorch import empty_output
from sparseformer.kernels.entmax_attention.saved import empty_saved
from sparseformer.testing import assert_close_to_reference

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return benchmarks/attention_normalisation.py, which draws the scores and runs the kernels."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_normalisation

    return attention_normalisation


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0])
@pytest.mark.parametrize("length", [1, 16, 256, 1024])
def test_probabilities_sum_to_one(problems: ModuleType, length: int, alpha: float) -> None:
    errors = problems.kernel_errors(length, alpha)
    assert max(errors) <= 1e-5, errors


@pytest.mark.parametrize(
    ("length", "alpha", "keep", "kind"),
    [
        (4096, 1.5, True, "std 0.05"),
        (4096, 1.05, False, "std 1"),
        (4096, 2.0, False, "std 0.05"),
    ],
)
def test_probabilities_of_long_rows_sum_to_one(
    problems: ModuleType, length: int, alpha: float, keep: bool, kind: str
) -> None:
    errors = problems.kernel_errors(length, alpha, keep, (kind,))
    assert max(errors) <= 1e-5, errors


def one_query(scores: Tensor) -> tuple[BackwardCase, Arguments]:
    """Return a problem whose only query has these scores."""
    case = BackwardCase(heads=1, key_heads=1, queries=1, keys=scores.numel(), scale=1.0)
    arguments = case.arguments()
    query, key = torch.zeros_like(arguments.query), torch.zeros_like(arguments.key)
    query[..., 0], key[0, 0, :, 0] = 1.0, scores
    return case, arguments._replace(query=query, key=key)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.9])
def test_equal_scores_take_no_refinement(alpha: float) -> None:
    """The sketch keeps 64 of 400 keys; t comes from the sums over the others."""
    case, arguments = one_query(torch.zeros(400))
    with counting() as work:
        attention_forward(arguments._replace(parameter=alpha), True, case.blocks)
    assert work.products == 25 + 3 * 25


def test_an_estimate_follows_keys_that_score_otherwise() -> None:
    """The 64 keys that are seen first score 0.01 less, which makes t of all the others too low."""
    scores = torch.full((400,), 0.01)
    scores[336:] = 0.0
    case, arguments = one_query(scores)
    halves = (x.half() for x in arguments[:3])
    with counting() as work:
        attention_forward(Arguments(*halves, *arguments[3:]), True, case.blocks)
    assert work.products == 25 + 3 * 25


@pytest.mark.parametrize("state", [2, 3], ids=["output", "refinement"])
def test_a_start_above_the_root_loses_no_tile(state: int) -> None:
    """At a t that is too high, a tile of the support weighs nothing: it must keep its bit."""
    scores = torch.full((400,), -5.0)
    scores[1], scores[100] = 1.0, -0.95
    case, arguments = one_query(scores)
    problem, blocks = forward_problem(arguments), case.blocks
    plan, rounding = problem.plan(True), rounding_of(problem.dtype)
    saved = empty_saved(arguments, True, blocks)
    first = State(saved.rows, saved.tiles, torch.empty(1, 1, 1, dtype=torch.int32))
    sketch_thresholds(problem, plan, rounding, blocks, first)
    first.threshold.add_(0.1)
    first.refine.fill_(state)
    output = empty_output(arguments, torch.float32)
    refine_and_output(problem, plan, rounding, blocks, first, output, saved)
    assert_close_to_reference(output, reference_output(case, arguments))
    expected = forward_state(case, arguments)
    torch.testing.assert_close(saved.rows, expected.rows)
    assert torch.equal(saved.tiles, expected.tiles)
