"""The map from scores to probabilities that one attention module of a foreign model owns."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sparseformer.config import AttnName, BackendName
from sparseformer.nn.attention_map import AttentionMap, AttentionOptions, check_map

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
        check_map(self.attn, self.alpha, self.k, self.p)
        if self.attn == "entmax_adaptive" and not 1.0 < self.init < 2.0:
            raise ValueError(f"init is {self.init}, but a learned alpha starts inside (1, 2).")

    def to_json(self) -> dict[str, Any]:
        """Return what config.json keeps; the backend belongs to the machine, not to the model."""
        return {name: value for name, value in asdict(self).items() if name != "backend"}


class HeadMap(AttentionMap):
    """Attend for one module of a model.

    Args:
        num_heads: Query heads of the module.
        choice: The map, and where its alpha starts.
    """

    def __init__(self, num_heads: int, choice: MapChoice) -> None:
        alpha = choice.init if choice.attn == "entmax_adaptive" else choice.alpha
        super().__init__(num_heads, choice.attn, alpha, choice.k, choice.p)
        self.backend = choice.backend

    def extra_repr(self) -> str:
        return f"{self.attn}, num_heads={self.num_heads}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attend as AttentionMap does, on the backend of this module."""
        options["backend"] = self.backend
        return super().attend(q, k, v, options)
