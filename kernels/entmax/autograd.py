"""Entmax over the last dim as an operator with gradients; only the probabilities are saved."""

from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen, choose_backend
from sparseformer.kernels.common.operators import define_operator, no_second_derivative
from sparseformer.kernels.entmax.checks import refuse_non_finite, refuse_outside, wide
from sparseformer.kernels.entmax.rows import Alpha, entmax_gradients, entmax_rows

BACKENDS: tuple[Chosen, ...] = ("pytorch", "cpp", "triton")

_refuse_second_derivative = no_second_derivative("entmax, sparsemax and entmax15")


def map_rows(
    scores: Tensor, alpha: Tensor | None, fixed_alpha: float, name: str, backend: str
) -> Tensor:
    """Return p of every row, differentiable in scores and alpha, under torch.compile as well.

    Args:
        scores: [..., n], any floating dtype and strides; -inf excludes an entry.
        alpha: broadcastable to [..., 1], fp32 or float64; or None.
        fixed_alpha: stands for alpha where that is None.
        name: the public function, for messages.
        backend: a checked Backend.

    Raises:
        ValueError: scores hold NaN or +inf, or an alpha is less than 1; not looked at on a GPU.
    """
    probs: Tensor = _OPERATOR(scores, alpha, fixed_alpha, name, backend)
    return probs


def _forward(
    scores: Tensor, alpha: Tensor | None, fixed_alpha: float, name: str, backend: str
) -> Tensor:
    refuse_non_finite(name, scores)
    if alpha is not None:
        refuse_outside(name, "alpha", alpha, least=1.0)
    chosen = choose_backend(name, backend, scores, BACKENDS, interprets_float64=True)
    if scores.numel() == 0:
        return scores.new_zeros(scores.shape)
    rows = scores if chosen == "triton" else wide(scores)
    probs = entmax_rows(rows, _plain(alpha, fixed_alpha), chosen)
    return probs.to(scores.dtype).contiguous()


def _forward_fake(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape)


def _gradients(
    probs: Tensor,
    grad: Tensor,
    alpha: Tensor | None,
    fixed_alpha: float,
    name: str,
    backend: str,
    want_scores: bool,
    want_alpha: bool,
) -> tuple[Tensor, Tensor]:
    """Return d scores, [..., n], and d alpha of every row, [..., 1]; [0] for one not wanted."""
    chosen = choose_backend(name, backend, probs, BACKENDS, interprets_float64=True)
    value = _plain(alpha, fixed_alpha)
    rows, upstream = (probs, grad) if chosen == "triton" else (wide(probs), wide(grad))
    if probs.numel() == 0:
        chosen = "pytorch"
    d_scores, d_alpha = entmax_gradients(rows, upstream, value, want_scores, want_alpha, chosen)
    nothing = probs.new_empty(0)
    return (
        nothing if d_scores is None else d_scores.to(probs.dtype).contiguous(),
        nothing.clone() if d_alpha is None else wide(d_alpha).contiguous(),
    )


def _gradients_fake(
    probs: Tensor,
    _grad: Tensor,
    _alpha: Tensor | None,
    _fixed_alpha: float,
    _name: str,
    _backend: str,
    want_scores: bool,
    want_alpha: bool,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if probs.dtype == torch.float64 else torch.float32
    return (
        probs.new_empty(probs.shape if want_scores else (0,)),
        probs.new_empty((*probs.shape[:-1], 1), dtype=dtype) if want_alpha else probs.new_empty(0),
    )


def _plain(alpha: Tensor | None, fixed_alpha: float) -> Alpha:
    """Return one alpha for all rows as a float, for which softmax, 1.5 and 2 have shorter ways."""
    if alpha is None:
        return fixed_alpha
    return float(alpha) if alpha.numel() == 1 and not alpha.is_cuda else alpha


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, alpha, *settings = inputs
    ctx.save_for_backward(output, alpha)
    ctx.settings = settings


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        _refuse_second_derivative()
    probs, alpha = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    d_scores, d_alpha = _GRADIENT_OPERATOR(probs, grad, alpha, *ctx.settings, *wanted)
    return (
        d_scores if wanted[0] else None,
        d_alpha.sum_to_size(alpha.shape) if wanted[1] else None,
        None,
        None,
        None,
    )


_OPERATOR = define_operator(
    "entmax",
    "(Tensor scores, Tensor? alpha, float fixed_alpha, str name, str backend) -> Tensor",
    _forward,
    _forward_fake,
    _backward,
    _save,
)
_GRADIENT_OPERATOR = define_operator(
    "entmax_backward",
    "(Tensor probs, Tensor grad, Tensor? alpha, float fixed_alpha, str name, str backend, "
    "bool want_scores, bool want_alpha) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
    _refuse_second_derivative,
)
