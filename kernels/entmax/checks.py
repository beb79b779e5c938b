"""Checks and reshaping that every mapping over one dim shares."""

import math

import torch
from torch import Tensor


def prepare_scores(name: str, x: Tensor, dim: int, temperature: float | Tensor) -> Tensor:
    """Return x / temperature with dim moved last, in fp32 (float64 stays); refuse NaN and +inf."""
    if not x.is_floating_point():
        raise ValueError(f"{name} needs floating point scores, got {x.dtype}; use x.float().")
    _refuse_non_finite(name, x)
    scores = x.reshape(1) if x.dim() == 0 else x.movedim(dim, -1)
    if x.dtype != torch.float64:
        scores = scores.float()
    if isinstance(temperature, Tensor):
        return _divide(scores, per_row(name, "temperature", temperature, x, dim, above=0.0))
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{name} needs a finite temperature above 0, got {temperature}.")
    return scores if temperature == 1.0 else scores / temperature


def restore(result: Tensor, x: Tensor, dim: int) -> Tensor:
    """Undo what `prepare_scores` did to shape and dtype."""
    result = result.reshape(()) if x.dim() == 0 else result.movedim(-1, dim).contiguous()
    return result.to(x.dtype)


def per_row(
    name: str,
    label: str,
    value: Tensor,
    x: Tensor,
    dim: int,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
) -> Tensor:
    """Return value, one per row of x along dim, in x's precision and shaped as [..., 1].

    Raises:
        ValueError: value has a wrong shape, isn't above `above` or is less than `least` somewhere.
    """
    _refuse_outside(name, label, value, above, least)
    rank = max(x.dim(), 1)
    if value.dim() > rank:
        raise ValueError(_shape_message(name, label, value, x, dim))
    full = value.reshape((1,) * (rank - value.dim()) + value.shape).movedim(dim, -1)
    rows = x.reshape(1) if x.dim() == 0 else x.movedim(dim, -1)
    fits = all(a in (1, b) for a, b in zip(full.shape[:-1], rows.shape[:-1], strict=True))
    if full.size(-1) != 1 or not fits:
        raise ValueError(_shape_message(name, label, value, x, dim))
    return full.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _shape_message(name: str, label: str, value: Tensor, x: Tensor, dim: int) -> str:
    return (
        f"{name} needs a {label} that broadcasts to scores of shape {tuple(x.shape)} with size 1 "
        f"along dim {dim}, got shape {tuple(value.shape)}."
    )


def _refuse_outside(name: str, label: str, value: Tensor, above: float, least: float) -> None:
    # On a GPU the check would wait for the device.
    if value.is_cuda or value.numel() == 0:
        return
    low, high = (float(bound) for bound in value.detach().aminmax())
    if not (low > above and low >= least and high < math.inf):
        bound = f"above {above:g}" if above > -math.inf else f"of {least:g} or more"
        bad = high if high == math.inf else low
        raise ValueError(f"{name} needs a finite {label} {bound}, got {bad}.")


def _refuse_non_finite(name: str, x: Tensor) -> None:
    """Raise if x holds NaN or +inf; -inf stands for an excluded entry. Costs one maximum."""
    if x.is_cuda or x.numel() == 0:
        return
    largest = float(x.detach().amax())
    if not largest < math.inf:
        raise ValueError(
            f"{name} got {largest} in its scores; pass finite scores, or -inf to exclude one."
        )


def _divide(scores: Tensor, temperature: Tensor) -> Tensor:
    """Divide so that an excluded score sends no NaN to the gradient of the temperature."""
    excluded = scores == -math.inf
    return (scores.masked_fill(excluded, 0.0) / temperature).masked_fill(excluded, -math.inf)
