"""Problems that the attention tests share, and their answer by the dense float64 definition."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.entmax_attention.checks import Options, entmax_arguments
from sparseformer.kernels.entmax_attention.operators import attend
from sparseformer.kernels.entmax_attention.reference import attention_probabilities, visible_keys


@dataclass(frozen=True)
class Case:
    """Sizes and masks of one problem; bounds of keys are given for each batch row."""

    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    queries: int = 5
    keys: int = 5
    dim: int = 4
    value_dim: int = 3
    alpha: float | tuple[float, ...] = 1.5
    is_causal: bool = False
    start: tuple[int, ...] | None = None
    length: tuple[int, ...] | None = None
    window: tuple[int, int] | None = None
    bias: bool = False
    spread: float = 1.5  # standard deviation of queries and keys

    def masks(self) -> dict[str, Any]:
        """Return the arguments that hide keys, as the functions under test take them."""
        bounds = {"key_start": self.start, "key_length": self.length}
        tensors = {
            name: None if bound is None else torch.tensor(bound, dtype=torch.int64)
            for name, bound in bounds.items()
        }
        return {"is_causal": self.is_causal, "window": self.window, **tensors}

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
        """Draw query, key, value, alpha and relative_bias."""
        draw = torch.Generator().manual_seed(seed)
        sizes = {
            "query": (self.batch, self.heads, self.queries, self.dim),
            "key": (self.batch, self.key_heads, self.keys, self.dim),
            "value": (self.batch, self.key_heads, self.keys, self.value_dim),
        }
        drawn = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
        result: dict[str, Any] = {name: x.to(dtype) for name, x in drawn.items()}
        result["query"] = (drawn["query"] * self.spread).to(dtype)
        if isinstance(self.alpha, tuple):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            result["alpha"] = torch.tensor(self.alpha, dtype=wide)
        else:
            result["alpha"] = self.alpha
        if self.bias:
            offsets = self.queries + self.keys - 1
            result["relative_bias"] = torch.randn(self.heads, offsets, generator=draw).to(dtype)
        return result


def dense_attention(case: Case, tensors: dict[str, Any]) -> Tensor:
    """Return the float64 output of a case; differentiable by autograd for alpha > 1."""
    masks = case.masks()
    visible = visible_keys(case.batch, case.queries, case.keys, **masks)
    probs = attention_probabilities(
        tensors["query"],
        tensors["key"],
        tensors["alpha"],
        visible=visible,
        relative_bias=tensors.get("relative_bias"),
    )
    value = tensors["value"].double()
    return probs @ value.repeat_interleave(case.heads // case.key_heads, dim=1)


def attend_in_chunks(chunk_elements: int, tensors: dict[str, Any], **options: Any) -> Tensor:
    """Run entmax_attention with blocks of about chunk_elements scores (1: row by row)."""
    qkv_alpha = [tensors[name] for name in ("query", "key", "value", "alpha")]
    options["relative_bias"] = tensors.get("relative_bias")
    arguments = entmax_arguments(*qkv_alpha, Options(**options))
    return attend(arguments._replace(chunk_elements=chunk_elements))
