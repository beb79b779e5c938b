"""Softmax on a kept set as an operator with gradients; only the result is saved."""

import math
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.operators import define_operator, no_second_derivative
from sparseformer.kernels.entmax.checks import refuse_non_finite, wide
from sparseformer.kernels.softmax_variants.reference import (
    keep_top_k,
    keep_top_p,
    log_softmax_rows,
    row_sizes,
    softmax_of_kept,
)

_refuse_second_derivative = no_second_derivative("topk_softmax and topp_softmax")


def kept_softmax(scores: Tensor, k: int | None, p: float, log: bool, name: str) -> Tensor:
    """Return softmax of every row on a set of kept scores, which counts as constant, or its log.

    Args:
        scores: [..., n], any floating dtype and strides; -inf excludes an entry.
        k: keep the k largest; with None, keep the nucleus of mass p.
        p: in (0, 1].
        log: return the logarithm, -inf off the set.
        name: the public function, for messages.

    Raises:
        ValueError: scores hold NaN or +inf; not looked at on a GPU.
    """
    result: Tensor = _OPERATOR(scores, k, p, log, name)
    return result


def checked_sizes(scores: Tensor, name: str) -> Tensor:
    """Return `row_sizes`, refusing NaN and +inf; no gradient flows through it."""
    sizes: Tensor = _SIZE_OPERATOR(scores, name)
    return sizes


def _forward(scores: Tensor, k: int | None, p: float, log: bool, name: str) -> Tensor:
    refuse_non_finite(name, scores)
    if scores.numel() == 0:
        return scores.new_zeros(scores.shape)
    rows = wide(scores.detach())
    kept = keep_top_p(rows, p) if k is None else keep_top_k(rows, k)
    result = log_softmax_rows(kept) if log else softmax_of_kept(kept)
    return result.to(scores.dtype).contiguous()


def _forward_fake(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.log = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        _refuse_second_derivative()
    result, upstream = wide(ctx.saved_tensors[0]), wide(grad)
    if ctx.log:
        upstream = upstream.masked_fill(result == -math.inf, 0.0)
        d_scores = upstream - result.exp() * upstream.sum(-1, keepdim=True)
    else:
        d_scores = result * (upstream - (result * upstream).sum(-1, keepdim=True))
    return d_scores.to(grad.dtype), None, None, None, None


def _sizes(scores: Tensor, name: str) -> Tensor:
    refuse_non_finite(name, scores)
    return row_sizes(scores.detach())


def _sizes_fake(scores: Tensor, _name: str) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], 1))


def _no_gradient(_ctx: Any, _grad: Tensor) -> tuple[None, None]:
    return None, None


_OPERATOR = define_operator(
    "kept_softmax",
    "(Tensor scores, SymInt? k, float p, bool log, str name) -> Tensor",
    _forward,
    _forward_fake,
    _backward,
    _save,
)
_SIZE_OPERATOR = define_operator(
    "taylor_sizes",
    "(Tensor scores, str name) -> Tensor",
    _sizes,
    _sizes_fake,
    _no_gradient,
)
