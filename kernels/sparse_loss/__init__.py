"""Losses whose gradient is zero for most classes, on logits and on hidden states."""

from sparseformer.kernels.sparse_loss.entmax_interface import (
    am_softmax_loss,
    entmax15_loss,
    entmax_loss,
    entmax_loss_with_stats,
    sparsemax_loss,
)
from sparseformer.kernels.sparse_loss.interface import (
    sparse_cross_entropy,
    sparse_cross_entropy_with_stats,
)
from sparseformer.kernels.sparse_loss.linear_interface import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss.linear_stats import (
    linear_entmax_loss_with_stats,
    linear_sparse_cross_entropy_with_stats,
)
from sparseformer.kernels.sparse_loss.parallel_interface import (
    parallel_linear_entmax_loss,
    parallel_linear_sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss.shared import LossStats

__all__ = [
    "LossStats",
    "am_softmax_loss",
    "entmax15_loss",
    "entmax_loss",
    "entmax_loss_with_stats",
    "linear_cross_entropy",
    "linear_entmax_loss",
    "linear_entmax_loss_with_stats",
    "linear_sparse_cross_entropy",
    "linear_sparse_cross_entropy_with_stats",
    "parallel_linear_entmax_loss",
    "parallel_linear_sparse_cross_entropy",
    "sparse_cross_entropy",
    "sparse_cross_entropy_with_stats",
    "sparsemax_loss",
]
