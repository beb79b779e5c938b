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
    return softmax_of_kept(keep_top_k(scores.detach(), k))


def topp_probabilities(scores: Tensor, p: float) -> Tensor:
    """Return softmax over the smallest set of largest scores whose softmax mass is p or more.

    Args:
        scores: [..., n], fp32 or float64; -inf is excluded.
        p: In (0, 1]; 1 keeps all scores. Of equal scores, those with the lowest index stay.

    Returns:
        Shape and dtype of scores, exactly 0 off the set; zeros for a row without a finite score.
    """
    return softmax_of_kept(keep_top_p(scores.detach(), p))


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Return the scores with -inf for all but the k largest; arguments as `topk_probabilities`."""
    return scores if k >= scores.size(-1) else _keep(scores, _largest(scores, k))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Return the scores with -inf off the nucleus; arguments as `topp_probabilities`."""
    if p >= 1.0 or scores.numel() == 0:
        return scores
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = softmax_of_kept(ranked)
    mass_before = probs.cumsum(-1, dtype=torch.float64).sub_(probs)
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, mass_before < p)
    return _keep(scores, kept)


def softmax_of_kept(scores: Tensor) -> Tensor:
    """Return softmax over the last dim, and zeros for a row of nothing but -inf."""
    if not scores.is_cuda:
        return softmax_rows(scores)
    # Asking whether there is such a row would wait for the device.
    return torch.softmax(scores, -1).masked_fill_(_empty(scores), 0.0)


def log_softmax_rows(scores: Tensor) -> Tensor:
    """Return log-softmax over the last dim, and -inf in a row of nothing but -inf."""
    return torch.log_softmax(scores, -1).masked_fill_(_empty(scores), -math.inf)


def taylor_probabilities(scores: Tensor, order: int, sizes: Tensor) -> Tensor:
    """Return T(s_j) / sum T(s), T(s) = sum_{i <= order} s**i / i!; differentiable.

    Each row is divided by M**order, M = max(1, max |s|), which cancels and keeps powers finite.

    Args:
        scores: [..., n], fp32 or float64; -inf is excluded.
        order: Even, 2 or more, which makes T positive everywhere.
        sizes: M of each row, [..., 1]: `row_sizes`.

    Returns:
        Shape and dtype of scores; zeros for a row without a finite score.
    """
    excluded = scores == -math.inf
    total = _polynomial(scores.masked_fill(excluded, 0.0), order, sizes)
    # T is positive, but of a negative score and a high order rounding needn't leave it so.
    total = total.clamp(min=0.0).masked_fill(excluded, 0.0)
    return total / total.sum(-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)


def taylor_log_probabilities(scores: Tensor, order: int, sizes: Tensor) -> Tensor:
    """Return log(T(s_j) / sum T(s)), arguments as in `taylor_probabilities`; differentiable.

    Each score is divided by its own max(1, |s_j|), so that no T(s_j) underflows before its log.

    Returns:
        Shape and dtype of scores; -inf for an excluded score.
    """
    excluded = scores == -math.inf
    finite = scores.masked_fill(excluded, 0.0)
    size = finite.detach().abs().clamp_(min=1.0)
    tiny = torch.finfo(scores.dtype).tiny
    logs = _polynomial(finite, order, size).clamp(min=tiny).log() + order * (size / sizes).log()
    total = logs.exp().masked_fill(excluded, 0.0).sum(-1, keepdim=True)
    logs = logs - total.clamp(min=tiny).log()
    return logs.masked_fill(excluded, -math.inf)


def row_sizes(scores: Tensor) -> Tensor:
    """Return max(1, max |s|) over the finite scores of each row, [..., 1]."""
    if scores.numel() == 0:
        return scores.new_ones((*scores.shape[:-1], 1))
    finite = scores.masked_fill(scores == -math.inf, 0.0)
    return finite.abs().amax(-1, keepdim=True).clamp_(min=1.0)


def _polynomial(scores: Tensor, order: int, size: Tensor) -> Tensor:
    """Return T(s) / size**order by Horner's rule in s / size."""
    ratio = scores / size
    total = torch.full_like(ratio, 1 / math.factorial(order))
    for i in range(order - 1, -1, -1):
        total = total * ratio + size ** (i - order) * (1 / math.factorial(i))
    return total


def _empty(scores: Tensor) -> Tensor:
    return (scores == -math.inf).all(-1, keepdim=True)


def _keep(scores: Tensor, kept: Tensor) -> Tensor:
    return scores.masked_fill(kept.logical_not_(), -math.inf)


def _largest(scores: Tensor, k: int) -> Tensor:
    """Mark the k largest scores of each row, ties by lowest index; k < n."""
    border = scores.topk(k, dim=-1).values[..., -1:]
    kept = scores >= border
    # On a GPU the shorter way without ties would wait for the device.
    if not scores.is_cuda and int(kept.sum()) == k * border.numel():
        return kept
    above = scores > border
    tied = kept & ~above
    places = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= places))
