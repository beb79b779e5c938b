"""What a run needs before its first step: folder, data, tokenizer."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from sparseformer.arguments import dump_toml, load_run_config
from sparseformer.config import Config
from sparseformer.data import (
    EncodedPairs,
    PairDataset,
    Tokenizer,
    build_tokenizer,
    load_dataset,
    shared_inputs,
)
from sparseformer.errors import CheckpointError, ConfigError, DataError
from sparseformer.pretrained import PretrainedCheckpoint, PretrainedSettings, load_tokenizer
from sparseformer.training.checkpoint import (
    Checkpoint,
    differences,
    lock_run,
    write_atomic,
)
from sparseformer.training.framing import Framing, encode_split, make_framing, settle_start
from sparseformer.training.origin import keep_published
from sparseformer.training.runfolder import LOCK

TOKENIZER = "tokenizer.json"


class Workspace(NamedTuple):
    """The data of a run, as text and as ids."""

    dataset: PairDataset
    tokenizer: Tokenizer
    train: EncodedPairs
    validation: EncodedPairs
    test: EncodedPairs
    framing: Framing


@contextmanager
def open_run_folder(config: Config) -> Iterator[Path]:
    """Create or reopen the run folder, and keep a second process out of it.

    Raises:
        ConfigError: the folder can't be written, holds something else than a run, or is in use.
    """
    run_dir = config.run_dir
    with lock_run(run_dir):
        others = [path for path in run_dir.iterdir() if path.name != LOCK]
        if others and not (run_dir / "config.toml").exists():
            raise ConfigError(
                f"The folder {run_dir} is not empty and holds no config.toml of a run; "
                "choose another with --name or --runs-dir."
            )
        yield run_dir


def load_workspace(
    config: Config,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    published: PretrainedSettings | None,
    console: Console,
) -> Workspace:
    """Load the data and the tokenizer, and say what they are.

    Raises:
        DataError: the data or the tokenizer are not those that the checkpoint was trained with.
    """
    dataset = load_dataset(config.data, config.seed)
    tokenizer = _load_tokenizer(config, run_dir, checkpoint, published, dataset, console)
    if checkpoint is not None:
        _check_same_tokenizer(config, checkpoint, tokenizer)
        check_same_data(config, dataset, checkpoint.state["data_hash"])
    limits = (config.data.max_source_length, config.data.max_target_length)
    framing = make_framing(config, tokenizer, published)
    settle_start(tokenizer, framing)
    train, validation, test = (
        encode_split(pairs, tokenizer, config.data, framing)
        for pairs in (dataset.train, dataset.validation, dataset.test)
    )
    cut_src = sum(split.truncated_src for split in (train, validation, test))
    cut_tgt = sum(split.truncated_tgt for split in (train, validation, test))
    console.print(
        f"data    {dataset.name}: {len(train.src):,} training, {len(validation.src):,} "
        f"validation, {len(test.src):,} test pairs, content {dataset.content_hash[:12]}"
    )
    shared = shared_inputs(dataset)
    if shared:
        console.print(f"        {shared:,} validation and test inputs also stand in training")
    for reason, rejection in dataset.rejected.items():
        where = ", ".join(rejection.first)
        console.print(
            f"        left out: {rejection.count:,} rows, {reason} ({where})", markup=False
        )
    console.print(
        f"tokens  vocabulary {tokenizer.vocab_size:,}; cut to length: {cut_src:,} sources "
        f"(limit {limits[0]}) and {cut_tgt:,} targets (limit {limits[1]})"
    )
    return Workspace(dataset, tokenizer, train, validation, test, framing)


def check_same_data(config: Config, dataset: PairDataset, trained_hash: str) -> None:
    """Refuse data that are not those of the training, unless --allow-changed-data is given.

    Raises:
        DataError: the hashes differ; held-out rows may have been trained on.
    """
    if dataset.content_hash != trained_hash and not config.allow_changed_data:
        raise DataError(
            f"The data have the hash {dataset.content_hash[:12]}, but the run was trained on "
            f"{trained_hash[:12]}; put the old data back, go on with --allow-changed-data, or "
            "start another run with --name."
        )


def settings_of_finished_run(config: Config, run_dir: Path, console: Console) -> Config:
    """Keep the settings that a finished run was trained with; take those of its evaluation."""
    trained = load_run_config(run_dir / "config.toml")
    kept = dataclasses.replace(trained, metrics=config.metrics, generation=config.generation)
    for line in differences(kept, config):
        console.print(f"ignored {line}, since the run is finished", markup=False)
    return kept


def write_settings(
    config: Config,
    tokenizer: Tokenizer,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    published: PretrainedSettings | None,
    console: Console,
) -> None:
    """Write config.toml, tokenizer.json and what stays of a published checkpoint.

    On resuming, say first what has changed, and write config.toml alone.

    Called when everything has been built and restored, so that a refused start changes nothing.
    """
    if checkpoint is None:
        tokenizer.save(run_dir / TOKENIZER)
        keep_published(published, run_dir)
    else:
        for line in differences(checkpoint.state["config"], config):
            console.print(f"changed {line}", markup=False)
    write_atomic(run_dir / "config.toml", dump_toml(config))


def _load_tokenizer(
    config: Config,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    published: PretrainedSettings | None,
    dataset: PairDataset,
    console: Console,
) -> Tokenizer:
    if checkpoint is not None:
        return read_tokenizer(run_dir)
    if isinstance(published, PretrainedCheckpoint):
        console.print(f"init    tokenizer of {published.source}", markup=False)
        return load_tokenizer(published)
    if config.init_from is not None:
        console.print(f"init    tokenizer of {config.init_from}", markup=False)
        return read_tokenizer(Path(config.init_from))
    return build_tokenizer(config.data, dataset)


def read_tokenizer(run_dir: Path) -> Tokenizer:
    """Read the tokenizer.json that a run left in its folder.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return Tokenizer.load(run_dir / TOKENIZER)
    except ConfigError as error:
        raise CheckpointError(
            f"{run_dir / TOKENIZER} is missing or damaged; put the file of this run back, or start "
            "another run with --name."
        ) from error


def _check_same_tokenizer(config: Config, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    if tokenizer.content_hash != checkpoint.state["tokenizer_hash"]:
        raise CheckpointError(
            f"The tokenizer.json in {config.run_dir} has the hash {tokenizer.content_hash[:12]}, "
            f"but step {checkpoint.step} was trained with that of hash "
            f"{checkpoint.state['tokenizer_hash'][:12]}; put the old file back, or "
            "start another run with --name."
        )
