"""What the forward kernels of attention share: their pointers, strides and settings."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import cdiv, kernel_input
from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.backward_problem import named_strides, split_alpha
from sparseformer.kernels.entmax_attention.blocks import Blocks, padded_dim
from sparseformer.kernels.entmax_attention.launch_table import Plan, plan_for
from sparseformer.kernels.entmax_attention.masks import keep_bound
from sparseformer.kernels.entmax_attention.row_bounds import RowBounds, row_bounds
from sparseformer.kernels.entmax_attention.saved import input_dtype


class State(NamedTuple):
    """What the first pass leaves for the last one.

    Attributes:
        threshold: t, [B, Hq, Lq].
        words: int32 [B, Hq, query blocks, words], a bit for each tile that may hold support.
        refine: int32 [B, Hq, query blocks]; bit 0 is set where t is too far off, bit 1 where it may
            lie above the root.
    """

    threshold: Tensor
    words: Tensor
    refine: Tensor

    def pointers(self) -> dict[str, Tensor]:
        """Return the tensors as arguments of a kernel."""
        return {f"{name}_ptr": tensor for name, tensor in self._asdict().items()}


@dataclass(frozen=True)
class Problem:
    """One forward pass, its tensors ready for the kernels.

    Attributes:
        query: [B, Hq, Lq, D], any strides, as key and value.
        bias: fp32 [Hq, Lq + Lk - 1] contiguous, -inf where it hides, or None.
        alpha: [Hq], fp32 or float64; None where eps is one of SHORT_EPS.
        eps: alpha - 1 where one of SHORT_EPS, else None.
        bounds: the keys that each query sees.
        seed: int64 [], or None without dropout.
        dropout_p: in [0, 1).
        scale: of the scores.
        dtype: of the inputs before the interpreter's detour for bf16.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    alpha: Tensor | None
    eps: float | None
    bounds: RowBounds
    seed: Tensor | None
    dropout_p: float
    scale: float
    dtype: torch.dtype

    def grid(self, blocks: Blocks) -> tuple[int]:
        """Return one program for each block of queries of each head."""
        batch, heads, num_queries, _ = self.query.shape
        return (batch * heads * cdiv(num_queries, blocks.queries),)

    def plan(self, keep: bool) -> Plan:
        """Return the settings of the two passes."""
        width = max(self.query.shape[3], self.value.shape[3])
        options = (self.bias is not None, self.seed is not None)
        return plan_for(self.dtype, width, self.eps, keep, *options)

    def pointers(self) -> dict[str, Tensor | None]:
        """Return the tensors that are read, as arguments of a kernel."""
        return {
            "query_ptr": self.query,
            "key_ptr": self.key,
            "value_ptr": self.value,
            "bias_ptr": self.bias,
            "alpha_ptr": self.alpha,
            "rows_ptr": self.bounds.rows,
            "spans_ptr": self.bounds.spans,
            "seed_ptr": self.seed,
        }

    def strides(self) -> dict[str, int]:
        """Return the strides of query, key and value."""
        named = {"q": self.query, "k": self.key, "v": self.value}
        return {name: n for x, t in named.items() for name, n in named_strides(x, t).items()}

    def sizes(self) -> dict[str, int]:
        """Return the sizes of a kernel."""
        heads, num_queries = self.query.shape[1:3]
        return {
            "bounds_step": self.bounds.batch_stride(),
            "heads": heads,
            "group": heads // self.key.shape[1],
            "num_queries": num_queries,
            "num_keys": self.key.shape[2],
        }

    def scalars(self) -> dict[str, float | int]:
        """Return the scale of the scores and what dropout needs."""
        keep = 1.0 - self.dropout_p
        return {
            "scale": self.scale,
            "keep_scale": 1.0 / keep,
            "keep_bound": keep_bound(self.dropout_p),
        }

    def constants(self) -> dict[str, Any]:
        """Return what a kernel is compiled for, block sizes aside."""
        dim, value_dim = self.query.shape[3], self.value.shape[3]
        return {
            "EPS": self.eps,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": padded_dim(dim),
            "BLOCK_V": padded_dim(value_dim),
            "HAS_BIAS": self.bias is not None,
            "HAS_DROPOUT": self.dropout_p > 0.0,
            "ACC": tl.float64 if self.dtype == torch.float64 else tl.float32,
        }


def forward_problem(arguments: Arguments) -> Problem:
    """Return the problem of a call; nothing is copied except under autocast and for a bias."""
    dtype = input_dtype(arguments)
    query, key, value = (kernel_input(x.to(dtype)) for x in arguments[:3])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    alpha, eps = split_alpha(arguments, wide)
    return Problem(
        query=query,
        key=key,
        value=value,
        bias=_hiding_bias(arguments.relative_bias, wide),
        alpha=alpha,
        eps=eps,
        bounds=row_bounds(arguments),
        seed=arguments.seed if arguments.dropout_p else None,
        dropout_p=arguments.dropout_p,
        scale=arguments.scale,
        dtype=dtype,
    )


def _hiding_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias with -inf for the most negative number of its dtype, which hides as well."""
    if bias is None:
        return None
    lowest = torch.finfo(bias.dtype).min / 2
    return bias.to(dtype).masked_fill(bias <= lowest, float("-inf")).contiguous()
