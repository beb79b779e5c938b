"""Attention with entmax, top-k or top-p probabilities: masks, packed sequences, learned alpha."""

from sparseformer.kernels.entmax_attention.interface import (
    entmax_attention,
    entmax_attention_with_stats,
    topk_attention,
    topk_attention_with_stats,
    topp_attention,
    topp_attention_with_stats,
)
from sparseformer.kernels.entmax_attention.stats import AttentionStats

__all__ = [
    "AttentionStats",
    "entmax_attention",
    "entmax_attention_with_stats",
    "topk_attention",
    "topk_attention_with_stats",
    "topp_attention",
    "topp_attention_with_stats",
]
