"""Settings of the loss, the optimiser and the loop."""

from dataclasses import dataclass

from sparseformer.config.checks import require, require_at_least, require_share
from sparseformer.config.choices import ScheduleName, SelectionName


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What each value of --loss is parametrised by."""

    k: int = 8
    """sparse_topk: the logits that stay in the sum, beside the target's."""
    p: float = 0.98
    """sparse_topp: the softmax mass that stays in the sum."""
    alpha: float = 1.5
    """entmax: alpha of the loss; entmax_adaptive: where it starts; in [1, 2]."""
    label_smoothing: float = 0.0
    """The share of the target's mass that is spread evenly: over the classes that a truncated loss
    keeps, else over the vocabulary."""
    warmup_steps: int | None = None
    """sparse_topk and sparse_topp: optimiser steps with the full cross-entropy first. From random
    weights a truncated sum teaches only the classes that are already on top, so it underfits;
    unset, it is a quarter of the run from scratch and 0 with --init-from."""

    def __post_init__(self) -> None:
        require_at_least("objective", self, 1, "k")
        require_at_least("objective", self, 0, "warmup_steps")
        require(0.0 < self.p <= 1.0, "objective.p", self.p, "in (0, 1]")
        require(1.0 <= self.alpha <= 2.0, "objective.alpha", self.alpha, "in [1, 2]")
        require_share("objective", self, "label_smoothing")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its parameter groups and the learning rate schedule."""

    lr: float = 2e-3
    """Peak learning rate."""
    alpha_lr: float = 4e-3
    """Peak learning rate of every learned alpha, which has no weight decay."""
    alpha_end: float | None = None
    """Attention entmax: alpha moves in a straight line from model.alpha to this, in [1, 2]."""
    alpha_ramp_steps: int | None = None
    """Optimiser steps until alpha_end is reached; unset, half of the run."""
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    schedule: ScheduleName = "cosine"
    warmup_steps: int = 200
    """Optimiser steps with a linearly rising learning rate."""
    final_lr_share: float = 0.0
    """linear and cosine: the share of the peak that is left at the last step."""
    clip_norm: float = 1.0
    """Largest L2 norm of the gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        zeros = ("lr", "alpha_lr", "weight_decay", "warmup_steps", "final_lr_share", "clip_norm")
        require_at_least("optim", self, 0, *zeros)
        require_at_least("optim", self, 1, "alpha_ramp_steps")
        end = 1.0 if self.alpha_end is None else self.alpha_end
        require(1.0 <= end <= 2.0, "optim.alpha_end", end, "in [1, 2]")
        require_share("optim", self, "beta1", "beta2")
        require(0 < self.eps < 1, "optim.eps", self.eps, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, and what to do on the way."""

    steps: int = 2000
    """Optimiser steps."""
    accumulate: int = 1
    """Micro-batches per optimiser step."""
    freeze: tuple[str, ...] = ()
    """Parts that keep their weights, by the start of their names: embedding, encoder, decoder,
    decoder.blocks.0 ...; all_but_alpha trains the learned alphas alone."""
    log_every: int = 50
    eval_every: int = 1000
    """Optimiser steps between validations; the last step always validates."""
    save_every: int = 1000
    """Optimiser steps between checkpoints; the last step always saves."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep, beside the best one."""
    metric: SelectionName | None = None
    """The validation figure that chooses the best checkpoint; unset, the first of metrics. Of
    equal figures the one with the lower loss wins."""
    patience: int | None = None
    """Stop after this many validations without a better figure."""
    max_nonfinite: int = 10
    """Stop with exit code 3 after this many steps in a row without a finite loss and gradient."""
    num_samples: int = 5
    """Sample predictions in the final report."""
    tensorboard: bool = False
    """Also write TensorBoard event files (extra `tensorboard`)."""

    def __post_init__(self) -> None:
        ones = ("steps", "accumulate", "log_every", "eval_every", "save_every", "keep_checkpoints")
        require_at_least("train", self, 1, *ones)
        require_at_least("train", self, 1, "patience", "max_nonfinite")
        require_at_least("train", self, 0, "num_samples")
