"""Every public function of the package on one page, in the manner of torch.nn.functional."""

from sparseformer.kernels.entmax import entmax, entmax15, sparsemax
from sparseformer.kernels.entmax_attention import (
    AttentionStats,
    entmax_attention,
    entmax_attention_with_stats,
    topk_attention,
    topk_attention_with_stats,
    topp_attention,
    topp_attention_with_stats,
)
from sparseformer.kernels.softmax_variants import taylor_softmax, topk_softmax, topp_softmax
from sparseformer.kernels.sparse_loss import (
    am_softmax_loss,
    entmax15_loss,
    entmax_loss,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
    sparsemax_loss,
)

__all__ = [
    "AttentionStats",
    "am_softmax_loss",
    "entmax",
    "entmax15",
    "entmax15_loss",
    "entmax_attention",
    "entmax_attention_with_stats",
    "entmax_loss",
    "linear_cross_entropy",
    "linear_entmax_loss",
    "linear_sparse_cross_entropy",
    "sparse_cross_entropy",
    "sparsemax",
    "sparsemax_loss",
    "taylor_softmax",
    "topk_attention",
    "topk_attention_with_stats",
    "topk_softmax",
    "topp_attention",
    "topp_attention_with_stats",
    "topp_softmax",
]
