"""The definitions of the softmax variants on the last dim, in plain PyTorch."""

import math

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import softmax_rows


def topk_probabilities(scores: Tensor, k: int) -> Tensor:
    """Return softmax over the k largest scores of each row, and exactly 0 elsewhere.

    Args:
        scores: [..., n], fp32 or float64; -inf is excluded.
        k: 1 or more. Of equal scores at the border, those with the lowest index stay.

    Returns:
        Shape and dtype of scores; zeros for a row without a finite score.
    """
    scores = scores.detach()
    return softmax_rows(scores if k >= scores.size(-1) else _keep(scores, _largest(scores, k)))


def topp_probabilities(scores: Tensor, p: float) -> Tensor:
    """Return softmax over the smallest set of largest scores whose softmax mass is p or more.

    Args:
        scores: [..., n], fp32 or float64; -inf is excluded.
        p: In (0, 1]; 1 keeps all scores. Of equal scores, those with the lowest index stay.

    Returns:
        Shape and dtype of scores, exactly 0 off the set; zeros for a row without a finite score.
    """
    scores = scores.detach()
    if p >= 1.0 or scores.numel() == 0:
        return softmax_rows(scores)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = softmax_rows(ranked)
    mass_before = probs.cumsum(-1, dtype=torch.float64).sub_(probs)
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, mass_before < p)
    return softmax_rows(_keep(scores, kept))


def taylor_probabilities(scores: Tensor, order: int) -> Tensor:
    """Return T(s_j) / sum T(s), T(s) = sum_{i <= order} s**i / i!; differentiable.

    Each row is divided by M**order, M = max(1, max |s|), which cancels and keeps powers finite.

    Args:
        scores: [..., n], fp32 or float64; -inf is excluded.
        order: Even, 2 or more, which makes T positive everywhere.

    Returns:
        Shape and dtype of scores; zeros for a row without a finite score.
    """
    if scores.numel() == 0:
        return scores.clone()
    excluded = scores == -math.inf
    finite = scores.masked_fill(excluded, 0.0)
    size = finite.detach().abs().amax(-1, keepdim=True).clamp_(min=1.0)
    ratio = finite / size
    total = torch.full_like(ratio, 1 / math.factorial(order))
    for i in range(order - 1, -1, -1):
        total = total * ratio + size ** (i - order) / math.factorial(i)
    total = total.masked_fill(excluded, 0.0)
    return total / total.sum(-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)


def _keep(scores: Tensor, kept: Tensor) -> Tensor:
    return scores.masked_fill(kept.logical_not_(), -math.inf)


def _largest(scores: Tensor, k: int) -> Tensor:
    """Mark the k largest scores of each row, ties by lowest index; k < n."""
    border = scores.topk(k, dim=-1).values[..., -1:]
    kept = scores >= border
    if int(kept.sum()) == k * border.numel():
        return kept
    above = scores > border
    tied = kept & ~above
    places = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= places))
