"""What the public losses on hidden states share: the checks of a call, and the operator's rule."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.sparse_loss.checks import (
    Reduction,
    check_alpha,
    check_head,
    check_options,
    check_tiles,
    check_truncation,
)
from sparseformer.kernels.sparse_loss.linear_autograd import LinearForward, Operands, linear_loss
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.shared import (
    DEFAULT_K,
    alpha_like,
    check_loss_backend,
    check_target,
)


class LinearCall(NamedTuple):
    """The arguments that every loss on hidden states has."""

    name: str
    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    weight: Tensor | None
    softcap: float | None
    chunk_size: int | None
    backend: Backend


def truncated(
    call: LinearCall, k: int | None, top_p: float | None, stats: bool = False
) -> LinearForward:
    """Check a call of a truncated cross-entropy and evaluate it; 64 logits stay by default."""
    call = _check_head(call)
    k = DEFAULT_K if k is None and top_p is None else k
    check_truncation(call.name, k, top_p, call.linear_weight.shape[0])
    return _evaluate(call, k, top_p, None, None, stats)


def entmax(call: LinearCall, alpha: float | Tensor, stats: bool = False) -> LinearForward:
    """Check a call of an entmax loss and evaluate it."""
    call = _check_head(call)
    check_alpha(call.name, alpha, tuple(call.input.shape[:-1]))
    fixed = None if isinstance(alpha, Tensor) else float(alpha)
    return _evaluate(call, None, None, fixed, alpha_like(alpha, call.input), stats)


def autocast_head(
    hidden: Tensor, linear_weight: Tensor, linear_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of the projection, in autocast's dtype where it is on."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, linear_weight, linear_bias
    dtype = torch.get_autocast_dtype(device)
    bias = None if linear_bias is None else linear_bias.to(dtype)
    return hidden.to(dtype), linear_weight.to(dtype), bias


def _check_head(call: LinearCall) -> LinearCall:
    check_loss_backend(call.name, call.backend)
    head = autocast_head(call.input, call.linear_weight, call.linear_bias)
    check_head(call.name, *head)
    hidden, linear_weight, linear_bias = head
    return call._replace(input=hidden, linear_weight=linear_weight, linear_bias=linear_bias)


def _evaluate(
    call: LinearCall,
    k: int | None,
    top_p: float | None,
    fixed_alpha: float | None,
    alpha: Tensor | None,
    stats: bool,
) -> LinearForward:
    name, target = call.name, call.target
    check_options(name, call.reduction, call.label_smoothing)
    check_tiles(name, call.softcap, call.chunk_size)
    if target.is_floating_point():
        raise ValueError(
            f"{name}: target has dtype {target.dtype}, but it must hold class ids; "
            "use the loss on logits for distributions."
        )
    shape = (*call.input.shape[:-1], call.linear_weight.shape[0])
    check_target(name, target, shape, call.weight, call.input)
    rule = Rule(
        name=name,
        k=k,
        top_p=top_p,
        alpha=fixed_alpha,
        label_smoothing=call.label_smoothing,
        ignore_index=call.ignore_index,
        backend=call.backend,
        softcap=call.softcap,
        chunk_size=call.chunk_size,
    )
    head = (call.input, call.linear_weight, call.linear_bias)
    return linear_loss(Operands(*head, alpha, target, call.weight), rule, stats)
