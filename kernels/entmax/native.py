"""Entmax on rows in compiled C++, on the CPU in fp32; the same results as the reference."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sparseformer.kernels.common.native import library
from sparseformer.kernels.entmax import gradient, reference
from sparseformer.kernels.entmax.reference import SolvedRows

Alpha = float | Tensor


def solve_rows(scores: Tensor, alpha: Alpha) -> SolvedRows:
    """Return what `reference.solve_rows` returns.

    Args:
        scores: [..., n], fp32; -inf excludes an entry.
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].
    """
    scores, shape = scores.detach(), (*scores.shape[:-1], 1)
    if scores.numel() == 0 or _all_steep(alpha):
        return reference.solve_rows(scores, alpha)
    assert scores.dtype == torch.float32, scores.dtype
    scores = scores.contiguous()
    solved = SolvedRows(torch.empty_like(scores), scores.new_empty(shape), scores.new_empty(shape))
    _call(
        "sparseformer_entmax_solve",
        inputs=(scores,),
        eps=_eps(alpha, shape),
        outputs=tuple(solved),
    )
    steep = _steep_rows(alpha, shape)
    if steep is not None:
        again = reference.solve_rows(scores[steep], _expanded(alpha, shape)[steep])
        for target, values in zip(solved, again, strict=True):
            target[steep] = values
    return solved


def gradients(
    probs: Tensor, grad: Tensor, alpha: Alpha, want_scores: bool, want_alpha: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return what `gradient.gradients` returns; grad isn't read where p is 0 all around.

    Args:
        probs: p, [..., n], fp32.
        grad: dP, the shape of probs, any strides.
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].
        want_scores: whether to return d scores.
        want_alpha: whether to return d alpha.
    """
    if probs.numel() == 0 or _all_steep(alpha) or not (want_scores or want_alpha):
        return gradient.gradients(probs, grad, alpha, want_scores, want_alpha)
    assert probs.dtype == torch.float32, probs.dtype
    probs, shape = probs.detach().contiguous(), (*probs.shape[:-1], 1)
    grad = grad.detach().to(torch.float32).contiguous()
    d_scores = torch.empty_like(probs) if want_scores else None
    d_alpha = probs.new_empty(shape) if want_alpha else None
    _call(
        "sparseformer_entmax_gradients",
        inputs=(probs, grad),
        eps=_eps(alpha, shape),
        outputs=(d_scores, d_alpha),
    )
    steep = _steep_rows(alpha, shape)
    if steep is not None:
        value = _expanded(alpha, shape)[steep]
        again = gradient.gradients(probs[steep], grad[steep], value, want_scores, want_alpha)
        for target, values in zip((d_scores, d_alpha), again, strict=True):
            if target is not None and values is not None:
                target[steep] = values
    return d_scores, d_alpha


def _call(
    name: str, *, inputs: tuple[Tensor, ...], eps: Tensor, outputs: tuple[Tensor | None, ...]
) -> None:
    """Run a function of cpp/rows.cpp on all rows; eps is one double, or one for each row."""
    length = inputs[0].size(-1)
    status = _function(name, len(inputs), len(outputs))(
        *(tensor.data_ptr() for tensor in inputs),
        inputs[0].numel() // length,
        length,
        eps.data_ptr(),
        0 if eps.numel() == 1 else 1,
        *(None if tensor is None else tensor.data_ptr() for tensor in outputs),
        torch.get_num_threads(),
    )
    if status:
        raise MemoryError(f"entmax: no memory for a row of {length} scores")


@cache
def _function(name: str, inputs: int, outputs: int) -> Callable[..., int]:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function = getattr(library(), name)
    function.argtypes = [
        *[pointer] * inputs,
        *[size] * 2,  # rows, length
        *[pointer, size],  # eps and its stride
        *[pointer] * outputs,
        ctypes.c_int,  # threads
    ]
    function.restype = ctypes.c_int
    call: Callable[..., int] = function
    return call


def _eps(alpha: Alpha, shape: tuple[int, ...]) -> Tensor:
    """Return alpha - 1, at most 1, as one double or as one for each row."""
    if isinstance(alpha, Tensor):
        one = alpha.numel() == 1
        flat = (alpha if one else alpha.expand(shape)).detach().reshape(-1).double()
        return (flat - 1).clamp_(max=1.0).contiguous()
    return torch.tensor([min(alpha - 1.0, 1.0)], dtype=torch.float64)


def _expanded(alpha: Alpha, shape: tuple[int, ...]) -> Tensor:
    assert isinstance(alpha, Tensor), "a float above 2 goes to the reference before"
    return alpha.detach().expand(shape)


def _all_steep(alpha: Alpha) -> bool:
    return not isinstance(alpha, Tensor) and alpha > 2.0


def _steep_rows(alpha: Alpha, shape: tuple[int, ...]) -> Tensor | None:
    """Return which rows have alpha above 2, [...] bool, where the reference takes over."""
    if not isinstance(alpha, Tensor):
        return None
    steep = (alpha.detach() > 2.0).expand(shape).squeeze(-1)
    return steep if bool(steep.any()) else None
