"""Losses whose gradient is zero for most classes, on logits and on hidden states."""

from sparseformer.kernels.sparse_loss.interface import (
    am_softmax_loss,
    entmax15_loss,
    entmax_loss,
    sparse_cross_entropy,
    sparsemax_loss,
)
from sparseformer.kernels.sparse_loss.linear_interface import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
)

__all__ = [
    "am_softmax_loss",
    "entmax15_loss",
    "entmax_loss",
    "linear_cross_entropy",
    "linear_entmax_loss",
    "linear_sparse_cross_entropy",
    "sparse_cross_entropy",
    "sparsemax_loss",
]
