"""Swap the attention of a Hugging Face model for sparse attention, and train it sparsely."""

from sparseformer.integrations.transformers.loading import from_pretrained
from sparseformer.integrations.transformers.loss import SparseTopKLoss
from sparseformer.integrations.transformers.swap import (
    alphas,
    parameter_groups,
    record_density,
    remove_sparse_attention,
    use_sparse_attention,
)

__all__ = [
    "SparseTopKLoss",
    "alphas",
    "from_pretrained",
    "parameter_groups",
    "record_density",
    "remove_sparse_attention",
    "use_sparse_attention",
]
