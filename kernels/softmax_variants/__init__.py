"""Softmax on the k largest scores, on the nucleus of mass p, and its Taylor polynomial."""

from sparseformer.kernels.softmax_variants.interface import (
    taylor_softmax,
    topk_softmax,
    topp_softmax,
)

__all__ = ["taylor_softmax", "topk_softmax", "topp_softmax"]
