"""Probabilities of attention sum to 1 on the CPU, for any number of keys and any spread of scores.

The output where all values are 1 is that sum, in fp32; rows of equal scores are the hardest. The
kernels are held to the same in tests/interpreter.
"""

from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from sparseformer.functional import entmax_attention

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = [4**power for power in range(9)]


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return benchmarks/attention_normalisation.py, which draws the scores."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_normalisation

    return attention_normalisation


def sums(problem: tuple[Tensor, Tensor, Tensor], alpha: float, backend: str) -> Tensor:
    """Return sum p of each kind of scores, head and row."""
    query, key, value = problem
    output = entmax_attention(query, key, value[..., :1], alpha, scale=1.0, backend=backend)
    return output[0, :, :, 0].double()


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0])
@pytest.mark.parametrize("backend", ["pytorch", "auto"])
def test_probabilities_sum_to_one_up_to_64k_keys(
    problems: ModuleType, alpha: float, backend: str
) -> None:
    for length in LENGTHS:
        problem = problems.problem(length)
        problem = (problem.query[:, :, :4], problem.key, problem.value)
        errors = (sums(problem, alpha, backend) - 1.0).abs()
        assert errors.max() <= 1e-5, f"{length} keys: {errors.amax(1).tolist()}"


def test_a_single_refinement_of_a_histogram_does_not_do(problems: ModuleType) -> None:
    """What the bound of 1e-5 is worth: AdaSplash-2's steps on 8192 equal scores give 1.3."""
    assert problems.adasplash_sums(problems.scores("equal", 8192))[0] == pytest.approx(
        1.3, abs=0.01
    )
