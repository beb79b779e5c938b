"""Softmax on the k largest scores, on the nucleus of mass p, and its Taylor polynomial."""

from sparseformer.kernels.softmax_variants.interface import (
    log_taylor_softmax,
    log_topk_softmax,
    log_topp_softmax,
    taylor_softmax,
    topk_softmax,
    topp_softmax,
)

__all__ = [
    "log_taylor_softmax",
    "log_topk_softmax",
    "log_topp_softmax",
    "taylor_softmax",
    "topk_softmax",
    "topp_softmax",
]
