"""The definition of attention: dense, float64, one mask at a time, for tests to compare with."""

import math

import torch
from torch import Tensor

BISECTION_STEPS = 64


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    *,
    visible: Tensor | None = None,
    relative_bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return entmax(scale Q K^T + bias, alpha) over the visible keys.

    Differentiable by autograd in query, key, relative_bias and (for alpha > 1) alpha. Needs
    [B, Hq, Lq, Lk] memory. Its threshold comes from bisection, so that it shares no step with
    the solver it judges.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D], Hq a multiple of Hkv.
        alpha: in [1, 2]; a number or a tensor [Hq].
        visible: bool, broadcastable to [B, Hq, Lq, Lk]; True where the query sees the key.
        relative_bias: [Hq, Lq + Lk - 1]; entry j - i + Lq - 1 belongs to query i and key j.
        scale: of the scores; else D ** -0.5.

    Returns:
        float64 [B, Hq, Lq, Lk]; rows that see no key are 0.
    """
    heads, num_queries, head_dim = query.shape[1:]
    num_keys = key.shape[2]
    key = key.double().repeat_interleave(heads // key.shape[1], dim=1)
    scores = query.double() @ key.mT * (max(head_dim, 1) ** -0.5 if scale is None else scale)
    if relative_bias is not None:
        offset = torch.arange(num_keys) - torch.arange(num_queries)[:, None]
        scores = scores + relative_bias.double()[:, offset + num_queries - 1]
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    alphas = torch.as_tensor(alpha, dtype=torch.float64).expand(heads)
    rows = [entmax_rows(scores[:, head], alphas[head]) for head in range(heads)]
    return torch.stack(rows, dim=1)


def visible_keys(
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Return True where a query sees a key, bool [B, 1, Lq, Lk]; arguments as entmax_attention."""
    j = torch.arange(num_keys)
    offset = j - torch.arange(num_queries)[:, None] - (num_keys - num_queries)
    visible = torch.ones(batch, num_queries, num_keys, dtype=torch.bool)
    if is_causal:
        visible &= offset <= 0
    if window is not None:
        visible &= (offset >= -window[0]) & (offset <= window[1])
    if key_start is not None:
        visible &= j >= key_start[:, None, None]
    if key_length is not None:
        visible &= j < key_length[:, None, None]
    return visible[:, None]


def entmax_rows(scores: Tensor, alpha: Tensor) -> Tensor:
    """Return entmax of float64 rows by bisection on t, differentiable by one Newton step."""
    if alpha == 1.0 or not scores.numel():
        return torch.nan_to_num(scores.softmax(-1))
    threshold = _bisect_threshold(scores.detach(), alpha.detach())
    eps = alpha - 1.0
    mass = _power_mass(scores, threshold, eps).sum(-1, keepdim=True)
    slope = _power_mass(scores, threshold, eps, shift=1.0).sum(-1, keepdim=True).detach()
    # The step is 0 up to rounding; its derivative is the implicit function theorem's.
    threshold = threshold + torch.where(slope > 0, (mass - 1.0) / slope.clamp_min(0.5), 0.0)
    return _power_mass(scores, threshold, eps)


def _power_mass(scores: Tensor, threshold: Tensor, eps: Tensor, shift: float = 0.0) -> Tensor:
    """Return max(1 + eps (s - t), 0) ** (1/eps - shift) on the support, else 0."""
    # Hidden scores are replaced before any product, because autograd would meet 0 * inf.
    hidden = scores == -math.inf
    base = 1.0 + eps * (torch.where(hidden, 0.0, scores) - threshold)
    inside = ~hidden & (base > 0)
    return torch.where(inside, torch.where(inside, base, 1.0) ** (1.0 / eps - shift), 0.0)


def _bisect_threshold(scores: Tensor, alpha: Tensor) -> Tensor:
    eps = alpha - 1.0
    low = scores.amax(-1, keepdim=True)
    low = torch.where(low.isinf(), 0.0, low)
    high = low + (scores.shape[-1] ** eps - 1.0) / eps
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2.0
        too_low = _power_mass(scores, middle, eps).sum(-1, keepdim=True) > 1.0
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return (low + high) / 2.0
