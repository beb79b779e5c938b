"""Modules: sparse mappings, sparse losses, attention, positions and transformers."""

from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.cache import DecoderCache
from sparseformer.nn.layers import FeedForward
from sparseformer.nn.losses import (
    AMSoftmaxLoss,
    Entmax15Loss,
    EntmaxLoss,
    LinearCrossEntropy,
    LinearEntmaxLoss,
    LinearSparseCrossEntropy,
    SparseCrossEntropyLoss,
    SparsemaxLoss,
)
from sparseformer.nn.mappings import (
    AdaptiveAlpha,
    Entmax,
    Entmax15,
    Sparsemax,
    TaylorSoftmax,
    TopkSoftmax,
    ToppSoftmax,
)
from sparseformer.nn.recording import record_attention
from sparseformer.nn.stacks import Memory, TransformerDecoder, TransformerEncoder
from sparseformer.nn.transformer import AttentionChoice, Seq2SeqTransformer, alpha_parameters

__all__ = [
    "AMSoftmaxLoss",
    "AdaptiveAlpha",
    "AttentionChoice",
    "DecoderCache",
    "Entmax",
    "Entmax15",
    "Entmax15Loss",
    "EntmaxLoss",
    "FeedForward",
    "LinearCrossEntropy",
    "LinearEntmaxLoss",
    "LinearSparseCrossEntropy",
    "Memory",
    "MultiheadAttention",
    "Seq2SeqTransformer",
    "SparseCrossEntropyLoss",
    "Sparsemax",
    "SparsemaxLoss",
    "TaylorSoftmax",
    "TopkSoftmax",
    "ToppSoftmax",
    "TransformerDecoder",
    "TransformerEncoder",
    "alpha_parameters",
    "record_attention",
]
