"""Entmax with alpha above 2, where the threshold alone doesn't hold enough digits."""

import torch
from torch import Tensor

# Halvings of [0, 1] until float64 has no value in between.
_BISECTIONS = 60


def solve_steep(scores: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the threshold t of rows with alpha = 1 + eps > 2.

    p = w ** (1 / eps) is infinitely steep at w = 0, so rounding of t moves small probabilities by
    rounding ** (1 / eps). Therefore the unknown is q, the smallest probability of the support:
    p_j = (q ** eps + eps (s_j - s_k)) ** (1 / eps), where s_k is the smallest score of the support.

    Args:
        scores: [rows, n], n >= 1; -inf is excluded.
        eps: [rows, 1], above 1.

    Returns:
        [rows, n] and [rows, 1], both float64; zeros for a row without a finite score.
    """
    eps = eps.double()
    ranked, order = scores.double().sort(dim=1, descending=True)
    size = _support_size(ranked, eps)
    edge = ranked.gather(1, size - 1)
    inside = torch.arange(ranked.size(1), device=ranked.device) < size
    gap = torch.where(inside & edge.isfinite(), eps * (ranked - edge), -torch.inf)
    smallest = _smallest_probability(gap, eps)
    probs = torch.zeros_like(ranked).scatter_(1, order, _from_smallest(smallest, gap, eps))
    threshold = edge + (1 - smallest**eps) / eps
    return probs, threshold.masked_fill_(~edge.isfinite(), 0.0)


def _support_size(ranked: Tensor, eps: Tensor) -> Tensor:
    """Count the support: s_k belongs to it if the keys above hold less than 1 where w_k = 0."""
    low = torch.ones(ranked.size(0), 1, dtype=torch.long, device=ranked.device)
    high = torch.full_like(low, ranked.size(1))
    for _ in range(ranked.size(1).bit_length()):
        middle = (low + high + 1) // 2
        gap = ranked - ranked.gather(1, middle - 1)
        mass = torch.where(gap > 0, (eps * gap) ** (1 / eps), 0.0).sum(1, keepdim=True)
        # An excluded score is infinitely far below the others, so its mass is inf.
        belongs = (mass < 1) & (middle <= _count_finite(ranked))
        low = torch.where(belongs, middle, low)
        high = torch.where(belongs, high, torch.maximum(middle - 1, low))
    return low


def _count_finite(ranked: Tensor) -> Tensor:
    return ranked.isfinite().sum(1, keepdim=True)


def _smallest_probability(gap: Tensor, eps: Tensor) -> Tensor:
    low = torch.zeros_like(eps)
    high = torch.ones_like(eps)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        too_much = _from_smallest(middle, gap, eps).sum(1, keepdim=True) > 1
        high = torch.where(too_much, middle, high)
        low = torch.where(too_much, low, middle)
    return (low + high) / 2


def _from_smallest(smallest: Tensor, gap: Tensor, eps: Tensor) -> Tensor:
    """Return p of the keys with gap >= 0, and 0 where gap is -inf."""
    above = (smallest**eps + gap).clamp_(min=0) ** (1 / eps)
    # smallest ** eps may be 0 by underflow where smallest isn't.
    return torch.where(gap == 0, smallest, above)
