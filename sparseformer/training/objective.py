"""The training loss that --loss names, on hidden states and the output matrix."""

import torch
from torch import Tensor, nn

from sparseformer.config import LossName, ObjectiveConfig
from sparseformer.errors import ConfigError
from sparseformer.functional import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    log_entmax,
)
from sparseformer.nn import AdaptiveAlpha

TRUNCATED: frozenset[LossName] = frozenset({"sparse_topk", "sparse_topp"})
_FIXED_ALPHA: dict[LossName, float] = {"entmax15": 1.5, "sparsemax": 2.0}


class Objective(nn.Module):
    """Sum one loss over the target tokens of a batch.

    Args:
        loss: the name given to --loss.
        config: its parameters.
        vocab_size: number of classes; `sparse_topk` needs k of at most this many.
        warmup_steps: optimiser steps for which a truncated loss is the full cross-entropy.

    Raises:
        ConfigError: k is larger than the vocabulary.
    """

    def __init__(
        self, loss: LossName, config: ObjectiveConfig, vocab_size: int, warmup_steps: int = 0
    ) -> None:
        super().__init__()
        if loss == "sparse_topk" and config.k > vocab_size:
            raise ConfigError(
                f"objective.k is {config.k}, but the vocabulary has only {vocab_size} tokens; "
                f"set --objective.k to {vocab_size} or less."
            )
        self.loss = loss
        self.config = config
        self.warmup_steps = warmup_steps if loss in TRUNCATED else 0
        self.alpha = AdaptiveAlpha(1, config.alpha) if loss == "entmax_adaptive" else None

    def forward(
        self,
        hidden: Tensor,
        output_weight: Tensor,
        labels: Tensor,
        step: int | None = None,
        output_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the loss summed over the labels other than -100; NaN where logits may overflow.

        Args:
            hidden: [B, T, d_model].
            output_weight: [vocab_size, d_model].
            labels: [B, T] int64.
            step: optimiser steps taken so far; None means that any warm-up is over.
            output_bias: [vocab_size], added to the logits.
        """
        if not _logits_are_finite(hidden, output_weight):
            return hidden.sum() * torch.nan
        smoothing = self.config.label_smoothing
        warming_up = step is not None and step < self.warmup_steps
        if self.loss == "cross_entropy" or warming_up:
            return linear_cross_entropy(
                hidden,
                output_weight,
                labels,
                linear_bias=output_bias,
                reduction="sum",
                label_smoothing=smoothing,
            )
        if self.loss in TRUNCATED:
            return linear_sparse_cross_entropy(
                hidden,
                output_weight,
                labels,
                linear_bias=output_bias,
                k=self.config.k if self.loss == "sparse_topk" else None,
                top_p=self.config.p if self.loss == "sparse_topp" else None,
                reduction="sum",
                label_smoothing=smoothing,
            )
        return linear_entmax_loss(
            hidden,
            output_weight,
            labels,
            self.current_alpha(),
            linear_bias=output_bias,
            reduction="sum",
            label_smoothing=smoothing,
        )

    def current_alpha(self) -> float | Tensor:
        """Return the alpha of an entmax loss: a constant, or the learned scalar."""
        if self.alpha is not None:
            alpha: Tensor = self.alpha()
            return alpha[0]
        return _FIXED_ALPHA.get(self.loss, self.config.alpha)

    @torch.no_grad()
    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return what the loss takes for log p: log-softmax, or log entmax with -inf at zeros."""
        if self.loss == "cross_entropy" or self.loss in TRUNCATED:
            return logits.float().log_softmax(-1)
        return log_entmax(logits.float(), self.current_alpha())


@torch.no_grad()
def _logits_are_finite(hidden: Tensor, output_weight: Tensor) -> bool:
    """Bound |z| by d max|h| max|w|; NaN and infinity anywhere fail the bound."""
    largest = hidden.abs().amax() * output_weight.abs().amax() * hidden.shape[-1]
    return bool(largest.isfinite())
