"""Where a fine-tuning run starts: another run, or a published checkpoint."""

import dataclasses
import shutil
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from sparseformer.arguments import load_run_config
from sparseformer.config import Config, ModelConfig
from sparseformer.errors import ConfigError
from sparseformer.nn import Seq2SeqTransformer, alpha_parameters
from sparseformer.nn.attention_map import is_alpha
from sparseformer.pretrained import (
    START_ALPHA,
    PretrainedCheckpoint,
    PretrainedSettings,
    read_pretrained,
    read_settings,
    save_settings,
)
from sparseformer.training.checkpoint import load_model_weights

PUBLISHED = "pretrained"
"""The folder in a run folder that keeps a published checkpoint's files, without its weights."""

# the parts of [model] that fix the names and shapes of the weights
_SHAPE_FIELDS = (
    "d_model",
    "num_heads",
    "head_dim",
    "num_kv_heads",
    "ffn_dim",
    "encoder_layers",
    "decoder_layers",
    "activation",
    "norm",
    "norm_position",
    "positions",
    "max_positions",
    "tie_embeddings",
)


class Origin(NamedTuple):
    """What a run is built on."""

    config: Config
    """With the shape of the model that the run starts from."""
    published: PretrainedSettings | None
    """The published checkpoint at the bottom; with its weights when they are still to be loaded."""


def find_origin(config: Config, run_dir: Path, *, is_resumed: bool, console: Console) -> Origin:
    """Settle what a run starts from: its model's shape, and where learned alphas start.

    A resumed run needs nothing but its own folder.

    Raises:
        ConfigError: --init-from names nothing that can be started from, or its positions are fewer
            than the lengths.
        CheckpointError: the published checkpoint can't be used.
    """
    if config.init_from is None:
        return Origin(config, read_published(run_dir) if is_resumed else None)
    if is_resumed:
        model, published = load_run_config(run_dir / "config.toml").model, read_published(run_dir)
    else:
        model, published = _read_start(config.init_from)
    config = _with_shape(config, model, None if is_resumed else console)
    config.check_lengths()
    return Origin(config, published)


def initialize(
    config: Config,
    published: PretrainedSettings | None,
    model: Seq2SeqTransformer,
    console: Console,
) -> None:
    """Load the weights that a run starts from; alphas these haven't learned start at model.alpha.

    Raises:
        CheckpointError: there is no usable checkpoint, or its weights don't fit.
    """
    assert config.init_from is not None
    if isinstance(published, PretrainedCheckpoint):
        published.load_into(model)
        published.weights.clear()  # a second copy of what may be a large model
        where = f"{published.source} ({published.family})"
    else:
        start = load_model_weights(config.init_from, model, prefix="model.", optional=is_alpha)
        where = str(start.path)
    console.print(f"init    weights from {where}", markup=False)
    if alpha_parameters(model):
        alpha = f"{config.model.start_alpha:g}"
        console.print(f"init    alphas that haven't been learned there start at {alpha}")


def read_published(run_dir: Path) -> PretrainedSettings | None:
    """Return the settings of the published checkpoint that a run was built on, if it was.

    Raises:
        CheckpointError: the files that the run keeps of it are damaged.
    """
    folder = run_dir / PUBLISHED
    return read_settings(folder) if folder.is_dir() else None


def keep_published(published: PretrainedSettings | None, run_dir: Path) -> None:
    """Keep what evaluation, resuming and export need of a published checkpoint in the run folder.

    Raises:
        CheckpointError: the disk refuses a file.
    """
    folder = run_dir / PUBLISHED
    if published is not None:
        save_settings(published, folder)
    elif folder.is_dir():
        shutil.rmtree(folder)  # left by a start from another checkpoint that never saved a step


def _read_start(init_from: str) -> tuple[ModelConfig, PretrainedSettings | None]:
    folder = Path(init_from)
    if (folder / "config.toml").is_file():
        return load_run_config(folder / "config.toml").model, read_published(folder)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{init_from} can't be started from: it has neither the config.toml of a run nor the "
            "config.json of a published checkpoint."
        )
    published = read_pretrained(init_from)
    return published.model, published


def _with_shape(config: Config, model: ModelConfig, console: Console | None) -> Config:
    changes = {name: getattr(model, name) for name in _SHAPE_FIELDS}
    for name, value in changes.items():
        if console is not None and value != getattr(config.model, name):
            line = f"init    model.{name} is {value}, as in {config.init_from}"
            console.print(line, markup=False)
    attns = config.attns
    if config.model.alpha is None and "entmax_adaptive" in attns and "entmax" not in attns:
        changes["alpha"] = START_ALPHA
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
