"""Loss, predictions and metrics of one split, in training and at its end alike."""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sparseformer.config import Config
from sparseformer.data import Batch, EncodedPairs, Tokenizer, collate, eval_batches
from sparseformer.errors import NumericError
from sparseformer.generation import generate
from sparseformer.metrics import compute_metrics
from sparseformer.training.module import TrainingModule, autocast, to_device


class Evaluation(NamedTuple):
    """What evaluating one split gives."""

    metrics: dict[str, float]
    """The loss per target token, and the figures that the configuration names."""
    predictions: list[str]
    """One text per row of the split, in its order."""


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is a pure function of the parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def evaluate(
    module: TrainingModule,
    encoded: EncodedPairs,
    references: Sequence[str],
    tokenizer: Tokenizer,
    config: Config,
    *,
    between_batches: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate every row of a split once.

    Args:
        module: the model and its loss; its training mode is restored.
        encoded: the split's token ids.
        references: the split's target texts, whole also where the ids were cut.
        tokenizer: turns generated ids into text.
        config: generation settings, metrics and the seed of sampling.
        between_batches: called before each batch; may raise to end the evaluation.
    """
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()
    loss_sum, num_targets = 0.0, 0
    predictions = [""] * len(encoded.src)
    try:
        for rows in evaluation_batches(encoded, config):
            between_batches()
            batch = to_device(collate(encoded, rows, tokenizer), device)
            with autocast(config, device):
                loss = module(batch).item()
                _require_finite(loss, rows)
                loss_sum += loss
                texts = generate_texts(module, batch, tokenizer, config)
            num_targets += batch.num_targets
            for row, text in zip(batch.rows, texts, strict=True):
                predictions[row] = text
    finally:
        module.train(was_training)
    figures = {"loss": loss_sum / num_targets if num_targets else math.nan}
    return Evaluation(
        figures | compute_metrics(predictions, references, config.metrics), predictions
    )


def _require_finite(loss: float, rows: Sequence[int]) -> None:
    if not math.isfinite(loss):
        raise NumericError(
            f"The loss of the evaluation rows {', '.join(map(str, rows[:8]))} is {loss}; the "
            "weights have diverged, so start again with a lower --optim.lr and another --name."
        )


def evaluation_batches(encoded: EncodedPairs, config: Config) -> list[list[int]]:
    """Group the rows of a split by length; a beam search gets smaller groups."""
    beam_size = config.generation.beam_size if config.generation.strategy == "beam" else 1
    return eval_batches(encoded, max(1, config.generation.batch_tokens // beam_size))


def generate_texts(
    module: TrainingModule, batch: Batch, tokenizer: Tokenizer, config: Config
) -> list[str]:
    """Generate one text per row of a batch."""
    hypotheses = generate(
        module.model,
        batch.src,
        batch.src_length,
        config.generation,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        max_length=config.generation.max_length or config.data.max_target_length,
        forbidden_ids=module.framing.forbidden_ids,
        constraints=module.framing.constraints,
        log_probabilities=module.objective.log_probabilities,
        seeds=[derive_seed(config.seed, "sample", row) for row in batch.rows],
    )
    return [tokenizer.decode(hypothesis.ids) for hypothesis in hypotheses]
