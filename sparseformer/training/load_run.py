"""A run, loaded from its folder for evaluation, generation and a look inside."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from sparseformer.arguments import load_run_config
from sparseformer.config import Config
from sparseformer.data import (
    Pair,
    Tokenizer,
    collate,
    encode_pairs,
    load_dataset,
)
from sparseformer.training.checkpoint import load_model_weights
from sparseformer.training.evaluation import (
    Evaluation,
    evaluate,
    evaluation_batches,
    generate_texts,
)
from sparseformer.training.module import TrainingModule, build_module, choose_device, to_device


class LoadedRun(NamedTuple):
    """The settings, the tokenizer and the best weights of a run."""

    config: Config
    tokenizer: Tokenizer
    module: TrainingModule


def load_run(run_dir: str | Path) -> LoadedRun:
    """Load a run folder; `load_run(path).module.model` is the Seq2SeqTransformer, in eval mode.

    Raises:
        ConfigError: the folder is not a run folder.
        CheckpointError: it holds no usable checkpoint.
    """
    run_dir = Path(run_dir)
    config = load_run_config(run_dir / "config.toml")
    tokenizer = Tokenizer.load(run_dir / "tokenizer.json")
    module = build_module(config, tokenizer, Console(quiet=True))
    load_model_weights(run_dir, module)
    return LoadedRun(config, tokenizer, module.to(choose_device(config)).eval())


def evaluate_split(run: LoadedRun, split: str) -> Evaluation:
    """Evaluate a run on its `validation` or `test` split."""
    pairs = getattr(load_dataset(run.config.data, run.config.seed), split)
    data = run.config.data
    encoded = encode_pairs(
        pairs, run.tokenizer, data.max_source_length, data.max_target_length, data.source_prefix
    )
    references = [pair.tgt for pair in pairs]
    return evaluate(run.module, encoded, references, run.tokenizer, run.config)


def generate_outputs(run: LoadedRun, texts: Sequence[str]) -> list[str]:
    """Generate one output per text, in order, as the run's generation settings say."""
    data = run.config.data
    pairs = [Pair(text, "") for text in texts]
    encoded = encode_pairs(
        pairs, run.tokenizer, data.max_source_length, data.max_target_length, data.source_prefix
    )
    device = next(run.module.parameters()).device
    outputs = [""] * len(texts)
    for rows in evaluation_batches(encoded, run.config):
        batch = to_device(collate(encoded, rows, run.tokenizer), device)
        generated = generate_texts(run.module, batch, run.tokenizer, run.config)
        for row, text in zip(rows, generated, strict=True):
            outputs[row] = text
    return outputs
