"""The map from scores to probabilities that one attention module of a foreign model owns."""

from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import Tensor, nn

from sparseformer.config import ATTN_NAMES, AttnName, BackendName
from sparseformer.functional import entmax_attention, topk_attention, topp_attention
from sparseformer.nn.attention import FIXED_ALPHAS, AttentionOptions, MultiheadAttention
from sparseformer.nn.mappings import AdaptiveAlpha
from sparseformer.nn.recording import DensityMeter

# The attribute of an attention module that holds its HeadMap, so part of the names of weights.
CHILD = "sparseformer"


@dataclass(frozen=True, kw_only=True)
class MapChoice:
    """Which map a module uses; the fields are the arguments of `use_sparse_attention`."""

    attn: AttnName = "entmax_adaptive"
    alpha: float = 1.5
    init: float = 1.05
    k: int = 8
    p: float = 0.9
    backend: BackendName = "auto"

    def __post_init__(self) -> None:
        if self.attn not in ATTN_NAMES:
            raise ValueError(f"attn is {self.attn!r}, but it must be one of {ATTN_NAMES}.")
        if self.attn == "entmax" and not 1.0 <= self.alpha <= 2.0:
            raise ValueError(f"alpha is {self.alpha}, but entmax attention needs one in [1, 2].")
        if self.attn == "entmax_adaptive" and not 1.0 < self.init < 2.0:
            raise ValueError(f"init is {self.init}, but a learned alpha starts inside (1, 2).")
        if self.attn == "topk" and self.k < 1:
            raise ValueError(f"k is {self.k}, but topk attention keeps at least 1 key.")
        if self.attn == "topp" and not 0.0 < self.p <= 1.0:
            raise ValueError(f"p is {self.p}, but topp attention needs a mass in (0, 1].")

    def to_json(self) -> dict[str, Any]:
        """Return what config.json keeps; the backend belongs to the machine, not to the model."""
        return {name: value for name, value in asdict(self).items() if name != "backend"}


class HeadMap(nn.Module):
    """Attend for one module of a model; with entmax_adaptive it owns one alpha per head.

    Args:
        num_heads: Query heads of the module.
        choice: The map, and where its alpha starts.
    """

    def __init__(self, num_heads: int, choice: MapChoice) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attn: AttnName = choice.attn
        self.k, self.p, self.backend = choice.k, choice.p, choice.backend
        self.meter: DensityMeter | None = None
        self.fixed_alpha = choice.alpha if choice.attn == "entmax" else FIXED_ALPHAS.get(self.attn)
        is_learned = choice.attn == "entmax_adaptive"
        self.adaptive_alpha = AdaptiveAlpha(num_heads, choice.init) if is_learned else None

    def extra_repr(self) -> str:
        return f"{self.attn}, num_heads={self.num_heads}"

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
        options["backend"] = self.backend
        if self.meter is not None:
            # A HeadMap has what the meter reads of a layer: attn, k, p and alpha().
            return self.meter.attend(cast(MultiheadAttention, self), q, k, v, options)
        if self.attn == "topk":
            return topk_attention(q, k, v, self.k, **options)
        if self.attn == "topp":
            return topp_attention(q, k, v, self.p, **options)
        alpha = self.alpha()
        assert alpha is not None
        return entmax_attention(q, k, v, alpha, **options)
