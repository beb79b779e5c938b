"""The two-stage benchmark: its commands are valid, and differ in nothing but what it compares."""

import dataclasses
import sys
from pathlib import Path

import pytest

from sparseformer.arguments import parse_config
from sparseformer.config import Config

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Config]:
    """Return the settings of every compared run of two seeds, by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import two_stage

    monkeypatch.setattr(sys, "argv", ["two_stage.py", "--seeds", "1", "2", "--out", "out"])
    runs = two_stage._comparison(two_stage._options())
    found = [(run.name, parse_config([*two_stage.COMMON, *run.flags], "p")[0]) for run in runs]
    assert len(dict(found)) == len(found) == 2 * (7 + 5)
    return dict(found)


def _without_the_compared(config: Config) -> Config:
    return dataclasses.replace(
        config,
        attn="softmax",
        loss="cross_entropy",
        model=dataclasses.replace(config.model, alpha=None),
        objective=dataclasses.replace(config.objective, warmup_steps=0, k=10),
    )


@pytest.mark.parametrize("stage", ["finetuned", "scratch"])
def test_runs_of_a_seed_differ_in_attention_and_loss_only(
    stage: str, configs: dict[str, Config]
) -> None:
    for seed in (1, 2):
        group = [
            _without_the_compared(config)
            for name, config in configs.items()
            if name.startswith(stage) and config.seed == seed
        ]
        assert len(group) == {"finetuned": 7, "scratch": 5}[stage]
        assert all(config == group[0] for config in group)


def test_stages_differ_in_where_they_start(configs: dict[str, Config]) -> None:
    tuned = configs["finetuned-entmax_adaptive-sparse_topk-seed2"]
    scratch = configs["scratch-entmax_adaptive-sparse_topk-seed2"]
    assert tuned.init_from == "out/runs/pretrained-seed2"
    assert scratch.init_from is None
    assert scratch.data.tokenizer_file == "out/runs/pretrained-seed2/tokenizer.json"
    assert (tuned.model.alpha, scratch.model.alpha) == (1.05, 1.5)
    assert tuned.objective.warmup_steps == scratch.objective.warmup_steps == 0
    assert tuned.optim == scratch.optim
    assert tuned.train == scratch.train


def test_extra_rows_are_what_they_are_called(configs: dict[str, Config]) -> None:
    warm = configs["scratch-entmax_adaptive-sparse_topk-warm-up-seed1"]
    assert warm.objective.warmup_steps == warm.train.steps // 4
    assert configs["finetuned-entmax_adaptive-from-1.5-sparse_topk-seed1"].model.alpha == 1.5
    assert configs["finetuned-softmax-sparse_topk-of-64-seed1"].objective.k == 64
    assert configs["finetuned-softmax-sparse_topk-seed1"].objective.k == 10
