"""Entmax in plain PyTorch: the threshold, the probabilities and the terms of the gradients."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.entmax.solver import (
    MAX_STEPS,
    Eps,
    block_maximum,
    block_probabilities,
    block_threshold,
    powers,
    row_blocks,
    solve_block,
    store_rows,
)
from sparseformer.kernels.entmax.steep import solve_steep

# Up to here (exp(y) - 1 - y) / y**2 is summed as a series; beyond it the quotient keeps its digits.
_SERIES_END = 0.3


class SolvedRows(NamedTuple):
    """Probabilities of rows, and what they can be computed from again."""

    probs: Tensor  # [..., n]
    maximum: Tensor  # [..., 1], of the scores
    threshold: Tensor  # [..., 1], t of the scores minus maximum


def solve_threshold(scores: Tensor, alpha: float | Tensor, *, max_steps: int = MAX_STEPS) -> Tensor:
    """Return the t with sum_j p_j = 1, p_j = max(1 + (alpha - 1)(s_j - t), 0) ** (1 / (alpha - 1)).

    At alpha = 1, p_j = exp(s_j - t) and t is the logsumexp. No gradient flows through here.
    t carries the rounding of max(s): subtract the row's maximum first if scores can be large.

    Args:
        scores: [..., n], fp32 or float64; -inf excludes an entry.
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1]. Above 2, small
            probabilities computed from t are only as good as rounding ** (1 / (alpha - 1)).
        max_steps: Upper limit of Newton steps; about 4 to 8 are taken.

    Returns:
        [..., 1], in the dtype of scores; 0 for a row without a finite score.
    """
    shape = (*scores.shape[:-1], 1)
    if scores.numel() == 0:
        return scores.new_zeros(shape)
    rows, eps = _as_rows(scores.detach(), alpha)
    if isinstance(eps, float) and eps == 0.0:
        t = rows.logsumexp(1, keepdim=True)
        return t.masked_fill_(t == -math.inf, 0.0).view(shape)
    t = torch.zeros_like(rows[:, :1])
    for at, block in row_blocks(rows, _at_most_one(eps)):
        scaled_t = solve_block(block, max_steps)
        threshold = block_threshold(block, scaled_t).add_(block_maximum(block))
        store_rows(t, at, threshold, block.dim)
    steep = _steep_rows(eps, rows)
    if steep is not None:
        t[steep] = solve_steep(rows[steep], _select(eps, steep))[1].to(t.dtype)
    return t.view(shape)


def entmax_rows(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """Return p of every row; see `solve_rows`."""
    if not isinstance(alpha, Tensor) and _eps(alpha, scores.dtype) == 0.0:
        return softmax_rows(scores)
    return solve_rows(scores, alpha).probs


def softmax_rows(scores: Tensor) -> Tensor:
    """Return softmax over the last dim, and zeros for a row of nothing but -inf."""
    scores = scores.detach()
    probs = torch.softmax(scores, -1)
    # Such a row is NaN in every column, and so is a row that holds a NaN, which stays.
    if bool(probs[..., :1].isnan().any()):
        probs.masked_fill_((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return probs


def solve_rows(scores: Tensor, alpha: float | Tensor) -> SolvedRows:
    """Return p of every row, normalised to rounding, and what to compute it again from.

    probabilities(scores - maximum, threshold, alpha) gives p again, and u. That costs less than
    `solve_threshold` followed by `probabilities`, and large scores lose no digits.

    Args:
        scores: [..., n], fp32 or float64; -inf excludes an entry.
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].

    Returns:
        probs [..., n], maximum [..., 1] and threshold [..., 1], in the dtype of scores; all 0 for a
        row without a finite score.
    """
    shape = (*scores.shape[:-1], 1)
    if scores.numel() == 0:
        return SolvedRows(torch.zeros_like(scores), *scores.new_zeros(2, *shape))
    rows, eps = _as_rows(scores.detach(), alpha)
    probs, maximum = torch.zeros_like(rows), rows.new_zeros(rows.size(0), 1)
    threshold = torch.zeros_like(maximum)
    if isinstance(eps, float) and eps == 0.0:
        eps = torch.finfo(rows.dtype).eps
    for at, block in row_blocks(rows, _at_most_one(eps)):
        block_probs, t = block_probabilities(block, solve_block(block, one_step_left=True))
        store_rows(probs, at, block_probs, block.dim)
        store_rows(maximum, at, block_maximum(block), block.dim)
        store_rows(threshold, at, t, block.dim)
    steep = _steep_rows(eps, rows)
    if steep is not None:
        steep_probs, t = solve_steep(rows[steep] - maximum[steep], _select(eps, steep))
        probs[steep], threshold[steep] = steep_probs.to(probs.dtype), t.to(probs.dtype)
    return SolvedRows(probs.view(scores.shape), maximum.view(shape), threshold.view(shape))


def probabilities(
    scores: Tensor, threshold: Tensor, alpha: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return p = w ** (1 / eps) and u = p ** (2 - alpha) = -dp/dt, eps = alpha - 1.

    w = max(1 + eps (s - t), 0); at alpha = 1, p = u = exp(s - t).

    Args:
        scores: [..., n], fp32 or float64.
        threshold: t, [..., 1].
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].

    Returns:
        p and u, both shaped as scores; exactly 0 off the support.
    """
    eps = _eps(alpha, scores.dtype)
    if isinstance(eps, float):
        if eps == 0.0:
            probs = torch.exp(scores - threshold)
            return probs, probs
        if eps == 0.5:
            root = torch.add(1 - 0.5 * threshold, scores, alpha=0.5).clamp_(min=0)
            return root * root, root
        if eps == 1.0:
            probs = scores.sub(threshold - 1).clamp_(min=0)
            return probs, probs.sign()
    return powers(scores.sub(threshold).mul_(eps), eps)


def alpha_term(probs: Tensor, slopes: Tensor, alpha: float | Tensor) -> Tensor:
    """Return p g, with which d alpha = sum_j p_j g_j (dP_j - delta), delta = sum u dP / sum u.

    g = ((1 - exp(-x)) / eps - L) / eps, L = log p, x = eps L; at alpha = 1, g = -L**2 / 2.
    Above alpha = 2 a multiple of u, which that sum cancels, is left out: u has no bound there.

    Args:
        probs: p, [..., n].
        slopes: u, [..., n].
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].

    Returns:
        Shape and dtype of probs; 0 off the support.
    """
    eps = _eps(alpha, probs.dtype)
    log_probs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log_()
    if isinstance(eps, float) and eps == 0.0:
        return log_probs.square_().mul_(probs).mul_(-0.5)
    y = log_probs * -eps
    without_slopes = (probs * y).add_(probs).div_(eps * eps)
    if isinstance(eps, float) and eps > 1.0:
        return without_slopes
    near = _phi(y.clamp(max=_SERIES_END)).mul_(log_probs).mul_(log_probs).mul_(probs).neg_()
    exact = torch.where(y < _SERIES_END, near, without_slopes - slopes / (eps * eps))
    if isinstance(eps, Tensor) and bool((eps > 1.0).any()):
        return torch.where(eps > 1.0, without_slopes, exact)
    return exact


def slopes_from(probs: Tensor, alpha: float | Tensor) -> Tensor:
    """Return u = p ** (2 - alpha) on the support and 0 off it; p and alpha as in `alpha_term`."""
    eps = _eps(alpha, probs.dtype)
    if isinstance(eps, float):
        if eps == 0.0:
            return probs
        if eps == 0.5:
            return probs.sqrt()
        if eps == 1.0:
            return probs.sign()
    # log has a slow path for 0 and for denormal numbers.
    powered = probs.clamp(min=torch.finfo(probs.dtype).tiny).log2_().mul_(1 - eps).exp2_()
    return powered.clamp_(max=torch.finfo(probs.dtype).max ** 0.5).mul_(probs.sign())


def _eps(alpha: float | Tensor, dtype: torch.dtype) -> Eps:
    """Return alpha - 1; a float 0.0 means softmax, in a tensor 0 becomes an eps without effect."""
    rounding = torch.finfo(dtype).eps
    if isinstance(alpha, Tensor):
        return (alpha.detach().to(dtype) - 1).clamp_(min=rounding)
    eps = float(alpha) - 1.0
    return eps if eps >= rounding else 0.0


def _as_rows(scores: Tensor, alpha: float | Tensor) -> tuple[Tensor, Eps]:
    eps = _eps(alpha, scores.dtype)
    if isinstance(eps, Tensor):
        eps = eps.expand(*scores.shape[:-1], 1).reshape(-1, 1)
    return scores.reshape(-1, scores.size(-1)), eps


def _at_most_one(eps: Eps) -> Eps:
    return min(eps, 1.0) if isinstance(eps, float) else eps.clamp(max=1.0)


def _steep_rows(eps: Eps, rows: Tensor) -> Tensor | None:
    """Return the indices of the rows with alpha above 2, or None."""
    if isinstance(eps, float):
        return torch.arange(rows.size(0), device=rows.device) if eps > 1.0 else None
    steep = (eps > 1.0).flatten().nonzero().flatten()
    return steep if steep.numel() else None


def _select(eps: Eps, steep: Tensor) -> Tensor:
    if isinstance(eps, float):
        return torch.full((steep.numel(), 1), eps, dtype=torch.float64, device=steep.device)
    return eps[steep]


def _phi(y: Tensor) -> Tensor:
    """Return (exp(y) - 1 - y) / y**2 for y in [0, 0.3] by its Taylor series."""
    degree = 13 if y.dtype == torch.float64 else 6
    total = torch.full_like(y, 1 / math.factorial(degree + 2))
    for k in range(degree - 1, -1, -1):
        total.mul_(y).add_(1 / math.factorial(k + 2))
    return total
