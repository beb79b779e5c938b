"""Every file in configs/ loads, says only what differs, and builds its model."""

import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch
from rich.console import Console

from sparseformer.arguments import parse_config
from sparseformer.config import BackendName, Config
from sparseformer.data import Tokenizer
from sparseformer.kernels.common.backends import Backend
from sparseformer.training.module import build_module

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def test_the_promised_configs_are_there() -> None:
    assert {path.stem for path in CONFIGS} == {
        "copy_tiny",
        "debian_summarization",
        "debian_translation",
        "docstrings",
        "g2p",
        "inflection",
        "iwslt17",
        "summarization_finetune",
        "xsum",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_a_model_that_takes_a_step(path: Path) -> None:
    config, _ = parse_config(
        ["--config", str(path), "--attn", "entmax_adaptive", "--loss", "sparse_topk"], "train.py"
    )
    words = [f"w{i}" for i in range(200)]
    tokenizer = Tokenizer.train([" ".join(words)], "word", 300)
    module = build_module(config, tokenizer, Console(quiet=True))
    src = torch.tensor([[5, 6, 7, tokenizer.eos_id]])
    hidden = module.model(src, torch.tensor([4]), torch.tensor([[tokenizer.bos_id, 8, 9]]))
    labels = torch.tensor([[8, 9, tokenizer.eos_id]])
    loss = module.objective(hidden, module.model.output_weight, labels)
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_says_only_what_differs_from_the_defaults(path: Path) -> None:
    default = Config()
    for key, value in tomllib.loads(path.read_text()).items():
        if not isinstance(value, dict):
            assert getattr(default, key) != value, key
            continue
        for name, setting in value.items():
            # the source is worth saying even where it is the default
            differs = getattr(getattr(default, key), name) != setting
            assert differs or (key, name) == ("data", "source"), f"{key}.{name}"


def test_the_inflection_config_is_the_default() -> None:
    path = next(path for path in CONFIGS if path.stem == "inflection")
    assert parse_config(["--config", str(path)], "p")[0] == Config()


def test_the_backends_of_a_config_are_those_of_the_kernels() -> None:
    assert get_args(BackendName) == get_args(Backend)
