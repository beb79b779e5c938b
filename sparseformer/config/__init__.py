"""Every setting of a run as dataclasses; the defaults are the embedded English inflection run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparseformer.config.checks import require
from sparseformer.config.choices import (
    ATTN_NAMES,
    LOSS_NAMES,
    LOWER_IS_BETTER,
    Activation,
    AttnName,
    BackendName,
    LossName,
    MetricName,
    NormName,
    NormPosition,
    PositionName,
    ScheduleName,
    SelectionName,
    SourceName,
    StrategyName,
    TokenizerKind,
)
from sparseformer.config.data import DataConfig
from sparseformer.config.generation import GenerationConfig
from sparseformer.config.model import ModelConfig
from sparseformer.config.training import ObjectiveConfig, OptimConfig, TrainConfig

__all__ = [
    "ATTN_NAMES",
    "LOSS_NAMES",
    "LOWER_IS_BETTER",
    "Activation",
    "AttnName",
    "BackendName",
    "Config",
    "DataConfig",
    "GenerationConfig",
    "LossName",
    "MetricName",
    "ModelConfig",
    "NormName",
    "NormPosition",
    "ObjectiveConfig",
    "OptimConfig",
    "PositionName",
    "ScheduleName",
    "SelectionName",
    "SourceName",
    "StrategyName",
    "TokenizerKind",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: train, evaluate, report."""

    name: str | None = None
    """The run folder is RUNS_DIR/NAME; the same command resumes it. Unset: DATA-ATTN-LOSS."""
    runs_dir: str = "runs"
    attn: AttnName = "softmax"
    """Attention of all layers."""
    loss: LossName = "cross_entropy"
    """Training loss."""
    init_from: str | None = None
    """What to start from (fine-tuning): a run folder, whose best weights and tokenizer are taken,
    or a checkpoint of T5, mT5, BART, mBART, Marian or Pegasus, a folder or a name on the Hugging
    Face hub."""
    seed: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the matrix products; weights and optimiser state stay fp32."""
    allow_fresh: bool = False
    """Start from step 0 although no checkpoint in the run folder can be used."""
    allow_changed_data: bool = False
    """Resume although the data are no longer those that the run began with."""
    metrics: tuple[MetricName, ...] = ("exact_match", "per", "chrf")
    """What predictions are scored by, from 0 to 100; the loss is always reported."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def __post_init__(self) -> None:
        plain = self.name is None or (self.name not in ("", ".", "..") and "/" not in self.name)
        require(plain, "name", self.name, "a folder name without /")
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        if self.init_from is None:
            self.check_lengths()
        self._check_alphas()
        known = (*self.metrics, "loss")
        metric = self.train.metric or "loss"
        require(metric in known, "train.metric", metric, f"one of metrics, here {known}")

    def check_lengths(self) -> None:
        """Refuse sequences longer than the positions; with init_from when these are known.

        Raises:
            ConfigError: model.max_positions is less than a length.
        """
        lengths = {
            "data.max_source_length": self.data.max_source_length,
            "data.max_target_length": self.data.max_target_length,
            "generation.max_length": self.generation.max_length or 0,
        }
        name = max(lengths, key=lambda key: lengths[key])
        allowed = f"at least {name} = {lengths[name]}"
        positions = self.model.max_positions
        require(lengths[name] <= positions, "model.max_positions", positions, allowed)

    def _check_alphas(self) -> None:
        model, attns = self.model, self.attns
        allowed = "in [1.001, 1.999] for entmax_adaptive, which starts there and learns"
        if "entmax_adaptive" in attns:
            require(1.001 <= model.start_alpha <= 1.999, "model.alpha", model.alpha, allowed)
        if self.optim.alpha_end is not None:
            used = f"left out unless an attention is entmax; here they are {attns[0]}"
            require("entmax" in attns, "optim.alpha_end", self.optim.alpha_end, used)
        if self.loss == "entmax_adaptive":
            alpha = self.objective.alpha
            require(1.001 <= alpha <= 1.999, "objective.alpha", alpha, allowed)

    @property
    def attns(self) -> tuple[AttnName | None, ...]:
        """--attn, and what stands in its place in the encoder, the decoder and between them."""
        model = self.model
        return self.attn, model.encoder_attn, model.decoder_attn, model.cross_attn

    @property
    def selection_metric(self) -> SelectionName:
        """The validation figure that chooses the best checkpoint."""
        return self.train.metric or (self.metrics[0] if self.metrics else "loss")

    @property
    def run_dir(self) -> Path:
        """The folder that this run writes into."""
        return Path(self.runs_dir) / (self.name or f"{self.data.label}-{self.attn}-{self.loss}")
