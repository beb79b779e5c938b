"""Checks and reshaping that every mapping over one dim shares."""

import math
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.operators import define_operator


def prepare_scores(name: str, x: Tensor, dim: int, temperature: float | Tensor) -> Tensor:
    """Return x / temperature with dim moved last; traceable, so values aren't looked at.

    The dtype stays if temperature is the float 1; divided scores are fp32, or float64 as x.
    """
    if not x.is_floating_point():
        raise ValueError(f"{name} needs floating point scores, got {x.dtype}; use x.float().")
    scores = _dim_last(x, dim)
    if isinstance(temperature, Tensor):
        rows = per_row(name, "temperature", temperature, x, dim)
        return _divide(wide(scores), _checked(name, "temperature", rows))
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{name} needs a finite temperature above 0, got {temperature}.")
    return scores if temperature == 1.0 else wide(scores) / temperature


def restore(result: Tensor, x: Tensor, dim: int) -> Tensor:
    """Undo what `prepare_scores` did to shape and dtype."""
    if x.dim() == 0:
        result = result.reshape(())
    elif dim not in (-1, x.dim() - 1):
        result = result.movedim(-1, dim).contiguous()
    return result.to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """Return x in the precision of computation: floats below fp32 become fp32, others stay."""
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


def per_row(name: str, label: str, value: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return value, one per row of x along dim, in `wide`'s precision of x, shaped as [..., 1].

    Raises:
        ValueError: value has a wrong shape.
    """
    rank = max(x.dim(), 1)
    if value.dim() > rank:
        raise ValueError(_shape_message(name, label, value, x, dim))
    full = value.reshape((1,) * (rank - value.dim()) + value.shape).movedim(dim, -1)
    rows = _dim_last(x, dim)
    fits = all(a in (1, b) for a, b in zip(full.shape[:-1], rows.shape[:-1], strict=True))
    if full.size(-1) != 1 or not fits:
        raise ValueError(_shape_message(name, label, value, x, dim))
    return full.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def refuse_outside(
    name: str, label: str, value: Tensor, *, above: float = -math.inf, least: float = -math.inf
) -> None:
    """Raise if a value isn't finite, above `above` and `least` or more; not traceable."""
    # On a GPU the check would wait for the device.
    if value.is_cuda or value.numel() == 0:
        return
    value = value.detach()
    bounds = (value, value) if value.numel() == 1 else value.aminmax()
    low, high = (float(bound) for bound in bounds)
    if not (low > above and low >= least and high < math.inf):
        bound = f"above {above:g}" if above > -math.inf else f"of {least:g} or more"
        bad = high if high == math.inf else low
        raise ValueError(f"{name} needs a finite {label} {bound}, got {bad}.")


def refuse_non_finite(name: str, x: Tensor) -> None:
    """Raise if x holds NaN or +inf; not traceable. Costs one maximum.

    -inf stands for an excluded entry.
    """
    if x.is_cuda or x.numel() == 0:
        return
    largest = float(x.detach().amax())
    if not largest < math.inf:
        raise ValueError(
            f"{name} got {largest} in its scores; pass finite scores, or -inf to exclude one."
        )


def _dim_last(x: Tensor, dim: int) -> Tensor:
    if x.dim() == 0:
        return x.reshape(1)
    return x if dim in (-1, x.dim() - 1) else x.movedim(dim, -1)


def _shape_message(name: str, label: str, value: Tensor, x: Tensor, dim: int) -> str:
    return (
        f"{name} needs a {label} that broadcasts to scores of shape {tuple(x.shape)} with size 1 "
        f"along dim {dim}, got shape {tuple(value.shape)}."
    )


def _divide(scores: Tensor, temperature: Tensor) -> Tensor:
    """Divide so that an excluded score sends no NaN to the gradient of the temperature."""
    excluded = scores == -math.inf
    return (scores.masked_fill(excluded, 0.0) / temperature).masked_fill(excluded, -math.inf)


def _checked(name: str, label: str, value: Tensor) -> Tensor:
    """Return value, refusing one that isn't above 0.

    A graph drops an operator whose result nobody reads, so this one returns zeros to be added.
    """
    zeros: Tensor = _POSITIVE_OPERATOR(value, name, label)
    return value + zeros


def _zeros_if_positive(value: Tensor, name: str, label: str) -> Tensor:
    refuse_outside(name, label, value, above=0.0)
    return value.new_zeros(value.shape)


def _fake_zeros(value: Tensor, _name: str, _label: str) -> Tensor:
    return value.new_empty(value.shape)


def _no_gradient(_ctx: Any, _grad: Tensor) -> tuple[None, None, None]:
    return None, None, None


_POSITIVE_OPERATOR = define_operator(
    "zeros_if_positive",
    "(Tensor value, str name, str label) -> Tensor",
    _zeros_if_positive,
    _fake_zeros,
    _no_gradient,
)
