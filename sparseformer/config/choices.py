"""The names that settings choose from."""

from typing import Literal, get_args

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

ATTN_NAMES: tuple[AttnName, ...] = get_args(AttnName)
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
