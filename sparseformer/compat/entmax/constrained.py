"""Normmax and budget sparsemax over the last dim: tau by bisection in float64, exact gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Halvings of a bracket until float64 has no digit left.
_HALVINGS = 64


class NormmaxFunction(torch.autograd.Function):
    """p = v / sum(v), v_j = max(x_j - tau, 0) ** (1 / (alpha - 1)), the alpha-norm of v being 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        top = _finite_or_zero(x.double().amax(-1, keepdim=True))
        scores = x.double() - top

        def at(tau: Tensor) -> Tensor:
            return (scores - tau).clamp(min=0.0)

        mass = alpha / (alpha - 1)
        # At tau = -1 the largest score alone fills the norm; at 0 nothing is left.
        start = torch.full_like(top, -1.0)
        tau = _bisect(lambda t: (at(t) ** mass).sum(-1, keepdim=True) > 1, start, start + 1)
        values = at(tau) ** (1 / (alpha - 1))
        total = values.sum(-1, keepdim=True)
        probs = values / total.where(total > 0, 1.0)
        ctx.save_for_backward(values, probs, total, alpha)
        return probs.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Chain p = v / sum(v) with dv_j = c_j (dx_j - <p, dx>), c = v ** (2 - alpha)/(alpha - 1).

        <p, dx> is d tau: it keeps the alpha-norm of v at 1.
        """
        values, probs, total, alpha = ctx.saved_tensors
        g = grad.double()
        d_values = (g - (g * probs).sum(-1, keepdim=True)) / total.where(total > 0, 1.0)
        slope = torch.where(values > 0, values ** (2 - alpha) / (alpha - 1), 0.0)
        direct = slope * d_values
        return (direct - probs * direct.sum(-1, keepdim=True)).to(grad.dtype), None


class BudgetFunction(torch.autograd.Function):
    """p_j = clamp(x_j - tau, 0, 1), tau such that they sum to the budget."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, budget: Tensor) -> Tensor:
        scores = x.double()
        high = _finite_or_zero(scores.amax(-1, keepdim=True))
        least = scores.masked_fill(scores == -math.inf, math.inf).amin(-1, keepdim=True)

        def at(tau: Tensor) -> Tensor:
            return (scores - tau).clamp(0.0, 1.0)

        def too_low(tau: Tensor) -> Tensor:
            return at(tau).sum(-1, keepdim=True) > budget

        tau = _bisect(too_low, _finite_or_zero(least) - 1, high)
        probs = at(_on_its_piece(scores, tau, budget))
        ctx.save_for_backward((probs > 0) & (probs < 1))
        return probs.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Only entries strictly between 0 and 1 move, and tau moves with their mean."""
        (inside,) = ctx.saved_tensors
        g = grad.masked_fill(~inside, 0.0)
        mean = g.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
        return (g - mean).masked_fill(~inside, 0.0), None


def _on_its_piece(scores: Tensor, tau: Tensor, budget: Tensor) -> Tensor:
    """Solve for tau exactly, given which entries lie strictly between 0 and 1 around tau."""
    inside = (scores > tau) & (scores - tau < 1)
    count = inside.sum(-1, keepdim=True)
    full = (scores - tau >= 1).sum(-1, keepdim=True)
    solved = (scores.masked_fill(~inside, 0.0).sum(-1, keepdim=True) + full - budget) / count
    return torch.where(count > 0, solved, tau)


def _bisect(too_low: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the smallest tau between low and high that isn't too low."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = too_low(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def _finite_or_zero(value: Tensor) -> Tensor:
    return value.where(value.isfinite(), 0.0)


def check_scores(name: str, scores: Tensor) -> None:
    """Refuse what isn't floating-point, and NaN and +inf where looking doesn't wait for a GPU."""
    if not scores.is_floating_point():
        raise ValueError(f"{name} needs floating point scores, got {scores.dtype}.")
    if scores.is_cuda or not scores.numel():
        return
    largest = float(scores.detach().amax())
    if not largest < math.inf:
        raise ValueError(
            f"{name} got {largest} in its scores; pass finite scores, or -inf to exclude one."
        )


def per_row(
    name: str,
    label: str,
    value: float | Tensor,
    scores: Tensor,
    dim: int,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
) -> Tensor:
    """Return a number for every row along dim, float64 [..., 1], dim moved last.

    Raises:
        ValueError: the value has a wrong shape, or is out of range somewhere.
    """
    shape = list(scores.shape)
    shape[dim] = 1
    given = torch.as_tensor(value, dtype=torch.float64, device=scores.device).detach()
    try:
        rows = given.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"{name} needs a {label} that broadcasts to {tuple(shape)}, got {tuple(given.shape)}."
        ) from error
    if not rows.is_cuda and not bool(((rows > above) & (rows >= least) & rows.isfinite()).all()):
        bound = f"above {above:g}" if above > -math.inf else f"of {least:g} or more"
        raise ValueError(f"{name} needs a finite {label} {bound}, got {value}.")
    return rows.movedim(dim, -1)
