"""A run, loaded from its folder for evaluation, generation and a look inside."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from sparseformer.arguments import load_run_config
from sparseformer.config import Config
from sparseformer.data import (
    Pair,
    Tokenizer,
    collate,
    load_dataset,
)
from sparseformer.pretrained import PretrainedSettings
from sparseformer.training.alpha_ramp import set_alpha_of_step
from sparseformer.training.checkpoint import load_model_weights
from sparseformer.training.evaluation import (
    Evaluation,
    evaluate,
    evaluation_batches,
    generate_texts,
)
from sparseformer.training.framing import encode_split, make_framing, settle_start
from sparseformer.training.module import TrainingModule, build_module, choose_device, to_device
from sparseformer.training.origin import read_published
from sparseformer.training.setup import check_same_data, read_tokenizer


class LoadedRun(NamedTuple):
    """The settings, the tokenizer and the best weights of a run."""

    config: Config
    tokenizer: Tokenizer
    module: TrainingModule
    data_hash: str
    published: PretrainedSettings | None = None
    """The published checkpoint that the run was built on."""


def load_run(run_dir: str | Path) -> LoadedRun:
    """Load a run folder; `load_run(path).module.model` is the Seq2SeqTransformer, in eval mode.

    Raises:
        ConfigError: the folder is not a run folder.
        CheckpointError: it holds no usable checkpoint.
    """
    run_dir = Path(run_dir)
    config = load_run_config(run_dir / "config.toml")
    tokenizer = read_tokenizer(run_dir)
    published = read_published(run_dir)
    framing = make_framing(config, tokenizer, published)
    settle_start(tokenizer, framing)
    module = build_module(config, tokenizer, Console(quiet=True), published, framing)
    checkpoint = load_model_weights(run_dir, module)
    set_alpha_of_step(module.model, config, checkpoint.step)
    module = module.to(choose_device(config)).eval()
    return LoadedRun(config, tokenizer, module, checkpoint.state["data_hash"], published)


def evaluate_split(run: LoadedRun, split: str) -> Evaluation:
    """Evaluate a run on its `validation` or `test` split.

    Raises:
        DataError: the data are not those that the run was trained on, and allow_changed_data is
            false; rows of the split may then have been trained on.
    """
    dataset = load_dataset(run.config.data, run.config.seed)
    check_same_data(run.config, dataset, run.data_hash)
    pairs = getattr(dataset, split)
    encoded = encode_split(pairs, run.tokenizer, run.config.data, run.module.framing)
    references = [pair.tgt for pair in pairs]
    return evaluate(run.module, encoded, references, run.tokenizer, run.config)


def generate_outputs(
    run: LoadedRun, texts: Sequence[str], warn: Callable[[str], object] = lambda _: None
) -> list[str]:
    """Generate one output per text, in order, as the run's generation settings say.

    Args:
        run: from load_run.
        texts: inputs.
        warn: gets one sentence when inputs were cut to the length limit or hold unknown tokens.
    """
    pairs = [Pair(text, "") for text in texts]
    encoded = encode_split(pairs, run.tokenizer, run.config.data, run.module.framing)
    if encoded.truncated_src:
        limit = run.config.data.max_source_length
        warn(f"{encoded.truncated_src} inputs were cut to {limit} tokens.")
    unknown = sum(run.tokenizer.unk_id in ids for ids in encoded.src)
    if unknown:
        warn(f"{unknown} inputs hold tokens that the run has never seen.")
    device = next(run.module.parameters()).device
    outputs = [""] * len(texts)
    for rows in evaluation_batches(encoded, run.config):
        batch = to_device(collate(encoded, rows, run.tokenizer), device)
        generated = generate_texts(run.module, batch, run.tokenizer, run.config)
        for row, text in zip(rows, generated, strict=True):
            outputs[row] = text
    return outputs
