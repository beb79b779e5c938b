"""Entmax in plain PyTorch: the threshold, the probabilities and the terms of the gradients."""

import math

import torch
from torch import Tensor

from sparseformer.kernels.entmax.solver import (
    MAX_STEPS,
    Eps,
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
    rows, eps = _as_rows(scores.detach(), alpha)
    shape = (*scores.shape[:-1], 1)
    if rows.numel() == 0:
        return scores.new_zeros(shape)
    if isinstance(eps, float) and eps == 0.0:
        t = rows.logsumexp(1, keepdim=True)
        return t.masked_fill_(t == -math.inf, 0.0).view(shape)
    t = torch.empty_like(rows[:, :1])
    for block_rows, block in row_blocks(rows, _at_most_one(eps)):
        scaled_t = solve_block(block, max_steps)
        store_rows(t, block_rows, block_threshold(block, scaled_t), block.dim)
    _replace_steep_rows(rows, eps, threshold=t)
    return t.view(shape)


def entmax_rows(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """Return p of every row, in the way of solve_threshold but exact for scores of any magnitude.

    Args:
        scores: [..., n], fp32 or float64; -inf excludes an entry.
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].

    Returns:
        Shape and dtype of scores; zeros for a row without a finite score.
    """
    rows, eps = _as_rows(scores.detach(), alpha)
    if rows.numel() == 0:
        return torch.zeros_like(scores)
    if isinstance(eps, float) and eps == 0.0:
        # Only a row without a finite score gives NaN here.
        return torch.softmax(scores.detach(), -1).nan_to_num_(0.0)
    probs = torch.empty_like(rows)
    for block_rows, block in row_blocks(rows, _at_most_one(eps)):
        store_rows(probs, block_rows, block_probabilities(block, solve_block(block)), block.dim)
    _replace_steep_rows(rows, eps, probs=probs)
    return probs.view(scores.shape)


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
    return scores.reshape(-1, scores.size(-1)) if scores.numel() else scores.view(0, 1), eps


def _at_most_one(eps: Eps) -> Eps:
    return min(eps, 1.0) if isinstance(eps, float) else eps.clamp(max=1.0)


def _replace_steep_rows(
    rows: Tensor, eps: Eps, probs: Tensor | None = None, threshold: Tensor | None = None
) -> None:
    eps = rows.new_full((rows.size(0), 1), eps) if isinstance(eps, float) else eps
    steep = (eps > 1.0).flatten().nonzero().flatten()
    if steep.numel() == 0:
        return
    steep_probs, steep_threshold = solve_steep(rows[steep], eps[steep])
    if probs is not None:
        probs[steep] = steep_probs.to(probs.dtype)
    if threshold is not None:
        threshold[steep] = steep_threshold.to(threshold.dtype)


def _phi(y: Tensor) -> Tensor:
    """Return (exp(y) - 1 - y) / y**2 for y in [0, 0.3] by its Taylor series."""
    degree = 13 if y.dtype == torch.float64 else 6
    total = torch.full_like(y, 1 / math.factorial(degree + 2))
    for k in range(degree - 1, -1, -1):
        total.mul_(y).add_(1 / math.factorial(k + 2))
    return total
