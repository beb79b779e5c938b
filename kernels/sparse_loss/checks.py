"""Checks of arguments that read no tensor's values; each error is a sentence with the remedy."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Reduction = Literal["none", "mean", "sum"]


def check_options(name: str, reduction: str, label_smoothing: float) -> None:
    """Refuse an unknown reduction and a label smoothing outside [0, 1]."""
    if reduction not in get_args(Reduction):
        allowed = ", ".join(get_args(Reduction))
        raise ValueError(f"{name}: reduction is {reduction!r}, but it must be one of {allowed}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"{name}: label_smoothing is {label_smoothing!r}, but it must be in [0, 1]."
        )


def check_truncation(name: str, k: int | None, top_p: float | None, num_classes: int) -> None:
    """Refuse both truncations at once, and a k or top_p out of range."""
    if k is not None and top_p is not None:
        raise ValueError(
            f"{name}: k is {k!r} and top_p is {top_p!r}, but a loss is truncated by one of them; "
            "leave the other out."
        )
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
        raise ValueError(f"{name}: k is {k!r}, but it must be a whole number of at least 1.")
    if k is not None and k > num_classes:
        raise ValueError(
            f"{name}: k is {k}, but there are only {num_classes} classes; "
            f"set k to {num_classes} or less."
        )
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"{name}: top_p is {top_p!r}, but it must be in (0, 1].")


def check_floating(name: str, argument: str, value: Tensor) -> None:
    """Refuse tensors that aren't real floating-point numbers."""
    if not value.is_floating_point():
        raise ValueError(
            f"{name}: {argument} has dtype {value.dtype}, but it must be a floating-point tensor."
        )


def check_device(name: str, argument: str, value: Tensor, device: torch.device) -> None:
    """Refuse a tensor on another device than the first argument's."""
    if value.device != device:
        raise ValueError(
            f"{name}: {argument} is on {value.device}, but the first argument is on {device}; "
            "move it there."
        )


def check_class_weight(name: str, weight: Tensor | None, num_classes: int, like: Tensor) -> None:
    """Refuse class weights of another shape, or to be learned."""
    if weight is None:
        return
    check_floating(name, "weight", weight)
    check_device(name, "weight", weight, like.device)
    if weight.shape != (num_classes,):
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}, but there are {num_classes} classes; "
            f"pass a tensor of shape ({num_classes},)."
        )
    _check_constant(name, "weight", weight)


def check_ids(name: str, target: Tensor, lead: tuple[int, ...]) -> None:
    """Refuse class ids of another shape or dtype."""
    if target.dtype == torch.bool or target.is_complex():
        raise ValueError(f"{name}: target has dtype {target.dtype}, but class ids are integers.")
    if tuple(target.shape) != lead:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, but class ids of this input have "
            f"shape {lead}."
        )


def check_distributions(name: str, target: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse target distributions of another shape, or to be learned."""
    if tuple(target.shape) != shape:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)} and a floating-point dtype, but "
            f"distributions over the classes of these logits have shape {shape}."
        )
    _check_constant(name, "target", target)


def check_alpha(name: str, alpha: float | Tensor, lead: tuple[int, ...]) -> None:
    """Refuse a number below 1 or not finite, and a tensor that doesn't fit the rows."""
    if not isinstance(alpha, Tensor):
        if not 1.0 <= alpha < math.inf:
            raise ValueError(f"{name}: alpha is {alpha!r}, but it must be finite and at least 1.")
        return
    check_floating(name, "alpha", alpha)
    try:
        fits = torch.broadcast_shapes(alpha.shape, lead) == lead
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: alpha has shape {tuple(alpha.shape)}, but it must broadcast to {lead}, one "
            "alpha for each row."
        )


def check_head(
    name: str, hidden: Tensor, linear_weight: Tensor, linear_bias: Tensor | None
) -> None:
    """Refuse hidden states and an output projection that don't fit together."""
    check_floating(name, "input", hidden)
    if linear_weight.ndim != 2 or 0 in linear_weight.shape:
        raise ValueError(
            f"{name}: linear_weight has shape {tuple(linear_weight.shape)}, but it must be "
            "[classes, features] with at least one of each."
        )
    num_classes, width = linear_weight.shape
    if hidden.ndim == 0 or hidden.shape[-1] != width:
        raise ValueError(
            f"{name}: input has shape {tuple(hidden.shape)}, but linear_weight has {width} "
            f"features; pass input of shape [..., {width}]."
        )
    if linear_bias is not None and linear_bias.shape != (num_classes,):
        raise ValueError(
            f"{name}: linear_bias has shape {tuple(linear_bias.shape)}, but linear_weight has "
            f"{num_classes} classes; pass a tensor of shape ({num_classes},)."
        )
    for argument, value in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if value is None:
            continue
        check_device(name, argument, value, hidden.device)
        if value.dtype != hidden.dtype:
            raise ValueError(
                f"{name}: {argument} has dtype {value.dtype} and input {hidden.dtype}, but a "
                "product needs one dtype; convert one of them or use torch.autocast."
            )


def check_tiles(name: str, softcap: float | None, chunk_size: int | None) -> None:
    """Refuse a softcap or a chunk_size that isn't positive."""
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap is {softcap!r}, but it must be above 0 and finite.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}: chunk_size is {chunk_size!r}, but it must be at least 1 token.")


def _check_constant(name: str, argument: str, value: Tensor) -> None:
    if value.requires_grad:
        raise ValueError(
            f"{name}: {argument} requires a gradient, but the loss has none for it; "
            f"pass {argument}.detach()."
        )
