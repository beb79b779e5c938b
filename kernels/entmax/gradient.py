"""The gradients of entmax in closed form, from the probabilities alone, in plain PyTorch."""

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import alpha_term, slopes_from
from sparseformer.kernels.entmax.solver import row_slices

Alpha = float | Tensor


def gradients(
    probs: Tensor, grad: Tensor, alpha: Alpha, want_scores: bool, want_alpha: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return d scores = u (dP - delta), [..., n], and d alpha = sum p g (dP - delta), [..., 1].

    delta = sum u dP / sum u, so that the gradient of every row sums to 0.
    """
    shape, length = probs.shape, probs.size(-1)
    d_scores = torch.zeros_like(probs) if want_scores else None
    d_alpha = probs.new_zeros(*shape[:-1], 1) if want_alpha else None
    if probs.numel() == 0:
        return d_scores, d_alpha
    probs, grad = probs.reshape(-1, length), grad.reshape(-1, length)
    per_row = alpha.expand(*shape[:-1], 1).reshape(-1, 1) if isinstance(alpha, Tensor) else None
    for rows in row_slices(*probs.shape):
        block_alpha = alpha if per_row is None else per_row[rows]
        slopes = slopes_from(probs[rows], block_alpha)
        centred = _centre(grad[rows], slopes)
        if d_alpha is not None:
            terms = alpha_term(probs[rows], slopes, block_alpha)
            d_alpha.view(-1, 1)[rows] = terms.mul_(centred).sum(1, keepdim=True)
        if d_scores is not None:
            d_scores.view(-1, length)[rows] = _balance(centred.mul_(slopes), slopes, block_alpha)
    return d_scores, d_alpha


def _centre(grad: Tensor, slopes: Tensor) -> Tensor:
    """Return dP - delta; a row without a support has slopes of 0 and keeps dP."""
    total = slopes.sum(1, keepdim=True).clamp_(min=torch.finfo(slopes.dtype).tiny)
    return grad - (grad * slopes).sum(1, keepdim=True).div_(total)


def _balance(d_scores: Tensor, slopes: Tensor, alpha: Alpha) -> Tensor:
    """Recompute the entry with the largest slope from the others, since a row sums to 0.

    Above alpha = 2, u has no bound: one entry can outweigh all others, and its dP - delta is
    then mere rounding. Up to alpha = 2, u is at most 1 and nothing is lost.
    """
    if float(torch.as_tensor(alpha).max()) <= 2.0:
        return d_scores
    largest = slopes.argmax(1, keepdim=True)
    d_scores.scatter_(1, largest, 0.0)
    return d_scores.scatter_(1, largest, -d_scores.sum(1, keepdim=True))
