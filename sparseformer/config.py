"""Every setting of a run as dataclasses; the defaults are the embedded English inflection run."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from sparseformer.errors import ConfigError

BackendName = Literal["auto", "pytorch", "cpp", "triton"]
AttnName = Literal["softmax", "sparsemax", "entmax15", "entmax", "entmax_adaptive", "topk", "topp"]
LossName = Literal[
    "cross_entropy",
    "sparse_topk",
    "sparse_topp",
    "sparsemax",
    "entmax15",
    "entmax",
    "entmax_adaptive",
]
SourceName = Literal["inflection", "docstrings", "g2p", "debian", "files", "hub", "copy"]
TokenizerKind = Literal["char", "word", "bpe"]
Activation = Literal[
    "relu",
    "gelu",
    "gelu_tanh",
    "swish",
    "gated_relu",
    "gated_gelu",
    "gated_gelu_tanh",
    "gated_swish",
]
NormName = Literal["layer_norm", "rms_norm"]
NormPosition = Literal["pre", "post"]
PositionName = Literal["none", "learned", "sinusoidal", "rotary", "t5", "alibi"]
ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt"]
StrategyName = Literal["greedy", "beam", "sample"]
MetricName = Literal[
    "exact_match", "rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "per", "wer"
]
SelectionName = Literal[
    "loss", "exact_match", "rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "per", "wer"
]

LOWER_IS_BETTER = frozenset({"per", "wer", "loss"})


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise a ConfigError that names the key, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"{key} is {value!r}, but it must be {allowed}.")


def _require_at_least(section: str, config: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            key = f"{section}.{name}"
            finite = math.isfinite(value)
            allowed = f"{minimum} or more{'' if finite else ' and finite'}"
            _require(finite and value >= minimum, key, value, allowed)


def _require_share(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0.0 <= value < 1.0, f"{section}.{name}", value, "in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs come from, how they become ids, and how ids become batches."""

    source: SourceName = "inflection"
    """Which pairs to train on; `sparseformer data SOURCE` builds one and prints its counts."""
    train_file: str | None = None
    """Source `files`: JSONL, CSV, TSV or parquet; or text, beside train_target_file."""
    validation_file: str | None = None
    """Source `files`: as train_file; without it, a part of the training rows is held out."""
    test_file: str | None = None
    """Source `files`: as train_file; without it, a part of the training rows is held out."""
    train_target_file: str | None = None
    """Source `files`, parallel text: the target side, line by line."""
    validation_target_file: str | None = None
    """Source `files`, parallel text: the target side of validation_file."""
    test_target_file: str | None = None
    """Source `files`, parallel text: the target side of test_file."""
    source_column: str | None = None
    """Sources `files` and `hub`: the column of the input text; else the first column."""
    target_column: str | None = None
    """Sources `files` and `hub`: the column of the output text; else the second column."""
    hub_name: str | None = None
    """Source `hub`: the data set's name on the Hugging Face hub, or a local folder of one."""
    hub_config: str | None = None
    """Source `hub`: the data set's configuration, such as iwslt2017-en-de."""
    hub_revision: str | None = None
    """Source `hub`: a branch, tag or commit."""
    translate: str | None = None
    """Source `debian`: a language code (de, fr, it ...) for translation in place of summaries."""
    cache_dir: str | None = None
    """Where built sources are kept; else $XDG_CACHE_HOME/sparseformer or ~/.cache/sparseformer."""
    source_prefix: str = ""
    """Text put before every input, such as "summarize: "."""
    tokenizer: TokenizerKind = "char"
    """What a token is: characters, words split at white space, or byte-level BPE."""
    tokenizer_file: str | None = None
    """A tokenizer.json to load in place of training one."""
    vocab_size: int = 8000
    """The largest vocabulary to train, special tokens included."""
    max_source_length: int = 48
    """Tokens of the input, EOS included; longer rows are cut and counted."""
    max_target_length: int = 48
    """Tokens of the output, EOS included; longer rows are cut and counted."""
    batch_tokens: int = 3072
    """Padded source plus target tokens of one micro-batch."""
    max_train_rows: int | None = None
    """Use the first rows of the training split only."""
    max_eval_rows: int | None = None
    """Use the first rows of the validation and test splits only."""
    max_bad_share: float = 0.05
    """Stop when more than this share of the rows can't be used."""

    def __post_init__(self) -> None:
        _require_at_least("data", self, 1, "batch_tokens", "max_train_rows", "max_eval_rows")
        _require_at_least("data", self, 2, "max_source_length", "max_target_length")
        _require_at_least("data", self, 5, "vocab_size")
        _require(
            0.0 <= self.max_bad_share <= 1.0, "data.max_bad_share", self.max_bad_share, "in [0, 1]"
        )

    @property
    def label(self) -> str:
        """A short name of the data, part of the default name of a run."""
        if self.source == "hub" and self.hub_name:
            return Path(self.hub_config or self.hub_name).name
        if self.source == "files" and self.train_file:
            return Path(self.train_file).stem
        return f"{self.source}-{self.translate}" if self.translate else self.source


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The size and the parts of an encoder-decoder transformer."""

    d_model: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads of every attention; divides d_model."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped or multi-query attention); divides num_heads; else num_heads."""
    ffn_dim: int = 256
    """Inner width of the feed-forward blocks."""
    encoder_layers: int = 2
    decoder_layers: int = 2
    dropout: float = 0.0
    """Dropout of embeddings and of every block's output."""
    attention_dropout: float = 0.0
    """Dropout of the attention probabilities."""
    activation: Activation = "relu"
    """Non-linearity of the feed-forward blocks; gated_* multiply by a second projection."""
    norm: NormName = "layer_norm"
    norm_position: NormPosition = "pre"
    """pre: normalise the input of a block; post: normalise the sum after it."""
    positions: PositionName = "sinusoidal"
    max_positions: int = 512
    """Longest sequence; learned positions have this many rows, and longer input is refused."""
    tie_embeddings: bool = True
    """Use one matrix for the input embedding and the output projection."""
    encoder_attn: AttnName | None = None
    """Attention of the encoder, when it differs from --attn."""
    decoder_attn: AttnName | None = None
    """Self-attention of the decoder, when it differs from --attn."""
    cross_attn: AttnName | None = None
    """Attention from decoder to encoder, when it differs from --attn."""
    alpha: float = 1.5
    """entmax: the alpha of every head; entmax_adaptive: where each head starts; in [1, 2]."""
    attn_k: int = 8
    """topk attention: keys that a query keeps."""
    attn_p: float = 0.9
    """topp attention: the softmax mass that a query keeps."""
    backend: BackendName = "auto"
    """What attention runs on. auto: Triton on a GPU; on a CPU compiled C++, or PyTorch without a
    compiler. triton on a CPU needs TRITON_INTERPRET=1 and is for tests."""

    def __post_init__(self) -> None:
        ones = ("d_model", "num_heads", "num_kv_heads", "ffn_dim", "max_positions", "attn_k")
        _require_at_least("model", self, 1, *ones)
        _require_at_least("model", self, 1, "encoder_layers", "decoder_layers")
        _require_share("model", self, "dropout", "attention_dropout")
        _require(1.0 <= self.alpha <= 2.0, "model.alpha", self.alpha, "in [1, 2]")
        _require(0.0 < self.attn_p <= 1.0, "model.attn_p", self.attn_p, "in (0, 1]")
        divisor = f"a divisor of model.d_model = {self.d_model}"
        _require(self.d_model % self.num_heads == 0, "model.num_heads", self.num_heads, divisor)
        kv_heads = self.num_kv_heads or self.num_heads
        divisor = f"a divisor of model.num_heads = {self.num_heads}"
        _require(self.num_heads % kv_heads == 0, "model.num_kv_heads", kv_heads, divisor)
        if self.positions == "rotary":
            head_dim = self.d_model // self.num_heads
            _require(
                head_dim % 2 == 0, "model.d_model / model.num_heads", head_dim, "even for rotary"
            )


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
        _require_at_least("objective", self, 1, "k")
        _require_at_least("objective", self, 0, "warmup_steps")
        _require(0.0 < self.p <= 1.0, "objective.p", self.p, "in (0, 1]")
        _require(1.0 <= self.alpha <= 2.0, "objective.alpha", self.alpha, "in [1, 2]")
        _require_share("objective", self, "label_smoothing")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its parameter groups and the learning rate schedule."""

    lr: float = 2e-3
    """Peak learning rate."""
    alpha_lr: float = 4e-3
    """Peak learning rate of every learned alpha, which has no weight decay."""
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
        _require_at_least("optim", self, 0, *zeros)
        _require_share("optim", self, "beta1", "beta2")
        _require(0 < self.eps < 1, "optim.eps", self.eps, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, and what to do on the way."""

    steps: int = 2000
    """Optimiser steps."""
    accumulate: int = 1
    """Micro-batches per optimiser step."""
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
        _require_at_least("train", self, 1, *ones)
        _require_at_least("train", self, 1, "patience", "max_nonfinite")
        _require_at_least("train", self, 0, "num_samples")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How outputs are searched for, in evaluation during training and at the end alike."""

    strategy: StrategyName = "greedy"
    beam_size: int = 4
    length_penalty: float = 1.0
    """beam: hypotheses are ranked by log-probability / length ** length_penalty."""
    no_repeat_ngram: int = 0
    """Never produce an n-gram of this length twice; 0 allows it."""
    temperature: float = 1.0
    """sample: logits are divided by this."""
    top_k: int = 0
    """sample: draw among this many most likely tokens; 0 means all."""
    top_p: float = 1.0
    """sample: draw among the most likely tokens that hold this share of the probability."""
    max_length: int | None = None
    """Longest output, EOS included; unset, data.max_target_length."""
    batch_tokens: int = 8192
    """Padded source tokens of one evaluation batch, times the beam size."""

    def __post_init__(self) -> None:
        _require_at_least("generation", self, 1, "beam_size", "max_length", "batch_tokens")
        _require_at_least("generation", self, 0, "no_repeat_ngram", "top_k", "length_penalty")
        temperature = self.temperature
        _require(
            0.01 <= temperature <= 100, "generation.temperature", temperature, "in [0.01, 100]"
        )
        _require(0.0 < self.top_p <= 1.0, "generation.top_p", self.top_p, "in (0, 1]")


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
    """A run folder whose best weights and tokenizer to start from (fine-tuning)."""
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
        _require(plain, "name", self.name, "a folder name without /")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        self._check_lengths()
        self._check_learned_alphas()
        known = (*self.metrics, "loss")
        metric = self.train.metric or "loss"
        _require(metric in known, "train.metric", metric, f"one of metrics, here {known}")

    def _check_lengths(self) -> None:
        lengths = {
            "data.max_source_length": self.data.max_source_length,
            "data.max_target_length": self.data.max_target_length,
            "generation.max_length": self.generation.max_length or 0,
        }
        name = max(lengths, key=lambda key: lengths[key])
        allowed = f"at least {name} = {lengths[name]}"
        positions = self.model.max_positions
        _require(lengths[name] <= positions, "model.max_positions", positions, allowed)

    def _check_learned_alphas(self) -> None:
        model = self.model
        attns = (self.attn, model.encoder_attn, model.decoder_attn, model.cross_attn)
        allowed = "in [1.001, 1.999] for entmax_adaptive, which starts there and learns"
        if "entmax_adaptive" in attns:
            _require(1.001 <= model.alpha <= 1.999, "model.alpha", model.alpha, allowed)
        if self.loss == "entmax_adaptive":
            alpha = self.objective.alpha
            _require(1.001 <= alpha <= 1.999, "objective.alpha", alpha, allowed)

    @property
    def selection_metric(self) -> SelectionName:
        """The validation figure that chooses the best checkpoint."""
        return self.train.metric or (self.metrics[0] if self.metrics else "loss")

    @property
    def run_dir(self) -> Path:
        """The folder that this run writes into."""
        return Path(self.runs_dir) / (self.name or f"{self.data.label}-{self.attn}-{self.loss}")


ATTN_NAMES: tuple[AttnName, ...] = get_args(AttnName)
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
