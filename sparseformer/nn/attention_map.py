"""The map from scores to probabilities that one attention owns, with a fixed or a learned alpha."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from torch import Tensor, nn

from sparseformer.config import ATTN_NAMES, AttnName, BackendName
from sparseformer.functional import entmax_attention, topk_attention, topp_attention
from sparseformer.nn.mappings import AdaptiveAlpha

if TYPE_CHECKING:
    from sparseformer.nn.recording import DensityMeter

FIXED_ALPHAS: dict[AttnName, float] = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}


class AttentionOptions(TypedDict):
    """The keyword arguments that every attention function takes alike."""

    is_causal: bool
    key_start: Tensor | None
    key_length: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    relative_bias: Tensor | None
    window: int | tuple[int, int] | None
    dropout_p: float
    scale: float | None
    backend: BackendName


class AttentionMap(nn.Module):
    """Attend by a map of its own; with entmax_adaptive it owns one alpha per head.

    Args:
        num_heads: Query heads.
        attn: The map.
        alpha: entmax: the alpha in [1, 2]; entmax_adaptive: where every head, or each head of a
            sequence, starts.
        k: topk: keys that a query keeps, at least 1.
        p: topp: softmax mass that a query keeps, in (0, 1].

    Raises:
        ValueError: If a value is outside its range.
    """

    def __init__(
        self, num_heads: int, attn: AttnName, alpha: float | Sequence[float], k: int, p: float
    ) -> None:
        super().__init__()
        check_map(attn, alpha, k, p)
        self.num_heads = num_heads
        self.attn: AttnName = attn
        self.k = k
        self.p = p
        self.meter: DensityMeter | None = None
        self.fixed_alpha: float | None = FIXED_ALPHAS.get(attn)
        if attn == "entmax" and isinstance(alpha, float | int):
            self.fixed_alpha = float(alpha)
        self.adaptive_alpha = AdaptiveAlpha(num_heads, alpha) if attn == "entmax_adaptive" else None

    def alpha(self) -> float | Tensor | None:
        """Return alpha: a float, a learned tensor [H], or None for topk and topp."""
        if self.adaptive_alpha is None:
            return self.fixed_alpha
        alpha: Tensor = self.adaptive_alpha()
        return alpha

    def alphas(self) -> list[float] | None:
        """Return the alpha of every head as numbers, or None for topk and topp."""
        alpha = self.alpha()
        if isinstance(alpha, Tensor):
            numbers: list[float] = alpha.detach().tolist()
            return numbers
        return None if alpha is None else [alpha] * self.num_heads

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Return [B, H, Lq, Dv] of q [B, H, Lq, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv]."""
        if self.meter is not None:
            return self.meter.attend(self, q, k, v, options)
        if self.attn == "topk":
            return topk_attention(q, k, v, self.k, **options)
        if self.attn == "topp":
            return topp_attention(q, k, v, self.p, **options)
        alpha = self.alpha()
        assert alpha is not None
        return entmax_attention(q, k, v, alpha, **options)


def is_alpha(name: str) -> bool:
    """Say whether a tensor of a state_dict belongs to the learned alphas of an AttentionMap."""
    return ".adaptive_alpha." in name


def check_map(attn: str, alpha: float | Sequence[float], k: int, p: float) -> None:
    """Refuse what a map can't have.

    Raises:
        ValueError: If the map is unknown, or a value that it uses is outside its range.
    """
    if attn not in ATTN_NAMES:
        raise ValueError(f"attn is {attn!r}, but it must be one of {ATTN_NAMES}.")
    if attn == "entmax" and not (isinstance(alpha, float | int) and 1.0 <= alpha <= 2.0):
        raise ValueError(f"alpha is {alpha!r}, but entmax attention needs one number in [1, 2].")
    if attn == "topk" and k < 1:
        raise ValueError(f"k is {k}, but topk attention keeps at least 1 key.")
    if attn == "topp" and not 0.0 < p <= 1.0:
        raise ValueError(f"p is {p}, but topp attention needs a mass in (0, 1].")
