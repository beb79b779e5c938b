"""Forced, suppressed and too early tokens, and the ends of a beam search, by small known models."""

import math

import pytest
from test_generation import BEAM, BOS, EOS, GREEDY, PAD, SAMPLE, A, B, MarkovModel, run

from sparseformer.config import GenerationConfig
from sparseformer.generation import Constraints
from sparseformer.generation.rules import BeamStopping

STRATEGIES = pytest.mark.parametrize(
    "config", [GREEDY, BEAM, SAMPLE], ids=["greedy", "beam", "sample"]
)
EVEN = {token: {A: 0.5, EOS: 0.3, B: 0.2} for token in (BOS, A, B)}
SUM = GenerationConfig(strategy="beam", beam_size=2, length_penalty=0.0)


@STRATEGIES
def test_a_forced_first_token_costs_nothing(config: GenerationConfig) -> None:
    model = MarkovModel({BOS: {A: 1.0}, B: {EOS: 0.5, B: 0.5}})
    found = run(model, [[3]], config, max_length=1, constraints=Constraints(forced_bos_id=B))
    assert found == [([B], 0.0)]


@STRATEGIES
def test_the_forced_first_token_may_be_bos_or_padding(config: GenerationConfig) -> None:
    model = MarkovModel({BOS: {A: 1.0}, PAD: {EOS: 1.0}, A: {EOS: 1.0}})
    for token in (BOS, PAD):
        asked = Constraints(forced_bos_id=token)
        assert run(model, [[3]], config, seeds=[1], constraints=asked)[0].ids[0] == token


@STRATEGIES
def test_the_forced_last_token_costs_nothing(config: GenerationConfig) -> None:
    model = MarkovModel({BOS: {A: 1.0}, A: {A: 1.0}})
    asked = Constraints(forced_eos_id=EOS)
    assert run(model, [[3]], config, max_length=4, constraints=asked) == [([A, A, A], 0.0)]


def test_at_length_one_the_end_goes_before_the_start() -> None:
    model = MarkovModel({BOS: {A: 1.0}})
    asked = Constraints(forced_bos_id=B, forced_eos_id=EOS)
    assert run(model, [[3]], GREEDY, max_length=1, constraints=asked) == [([], 0.0)]


@pytest.mark.parametrize("config", [GREEDY, SUM], ids=["greedy", "beam"])
def test_nothing_takes_the_place_of_a_suppressed_token(config: GenerationConfig) -> None:
    """transformers masks after normalising; a banned id is left out before."""
    model = MarkovModel({BOS: {A: 0.6, B: 0.4}, B: {EOS: 1.0}})
    suppressed = run(model, [[3]], config, constraints=Constraints(suppressed_ids=(A,)))[0]
    assert suppressed == ([B], pytest.approx(math.log(0.4)))
    assert run(model, [[3]], config, forbidden_ids=[A])[0] == ([B], pytest.approx(0.0))


def test_suppressed_padding_is_not_banned_before_normalising() -> None:
    model = MarkovModel({BOS: {PAD: 0.6, A: 0.4}, A: {EOS: 1.0}})
    assert run(model, [[3]], GREEDY)[0] == ([A], pytest.approx(0.0))
    found = run(model, [[3]], GREEDY, constraints=Constraints(suppressed_ids=(PAD,)))[0]
    assert found == ([A], pytest.approx(math.log(0.4)))


@STRATEGIES
@pytest.mark.parametrize("fewest", [1, 2, 5])
def test_min_length_counts_eos(config: GenerationConfig, fewest: int) -> None:
    model = MarkovModel({token: {EOS: 0.9, A: 0.1} for token in (BOS, A)})
    asked = Constraints(min_length=fewest)
    ids = run(model, [[3]], config, seeds=[3], constraints=asked)[0].ids
    assert len(ids) + 1 >= fewest
    if config is not SAMPLE:
        assert ids == [A] * (fewest - 1)


LONG_WAY = [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("goes_on", "stopping", "steps", "expected"),
    [
        (0.5, "full", 2, []),
        (0.5, "heuristic", 9, LONG_WAY),
        (0.5, "exact", 9, LONG_WAY),
        (0.4, "heuristic", 2, []),
        (0.4, "exact", 9, LONG_WAY),
        (0.1, "full", 2, [3]),
        (0.1, "heuristic", 2, [3]),
        (0.1, "exact", 9, LONG_WAY),
    ],
    ids=[
        "full",
        "heuristic",
        "exact",
        "heuristic, close",
        "exact, close",
        "full, dear",
        "heuristic, dear",
        "exact, dear",
    ],
)
def test_each_beam_search_ends_where_it_says(
    goes_on: float, stopping: BeamStopping, steps: int, expected: list[int]
) -> None:
    """Two outputs are complete after 2 steps; a long one has the best mean, at its end only.

    After 2 steps the open one is better than the worse of the two, or worse: a little (close), or
    much (dear).
    """
    first = 0.5 if goes_on == 0.1 else 0.7
    certain = {token: {token + 1: 1.0} for token in range(4, 10)}
    rows = {BOS: {EOS: first, A: 1 - first}, A: {EOS: 0.95 - goes_on, 4: goes_on, 0: 0.05}}
    model = MarkovModel(rows | certain | {10: {EOS: 1.0}}, 11)
    config = GenerationConfig(strategy="beam", beam_size=2, length_penalty=1.0)
    asked = Constraints(beam_stopping=stopping, suppressed_ids=(PAD,))
    assert run(model, [[3]], config, constraints=asked, max_length=9)[0].ids == expected
    assert len(model.batch_sizes) == steps


def test_no_constraint_changes_nothing() -> None:
    model = MarkovModel(EVEN)
    for config in (GREEDY, BEAM):
        assert run(model, [[3]], config) == run(model, [[3]], config, constraints=Constraints())
