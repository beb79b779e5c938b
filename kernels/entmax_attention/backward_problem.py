"""What the backward kernels of attention share: their pointers, strides and settings."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import cdiv
from sparseformer.kernels.common.tuning import launch_chosen
from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.backward_plans import (
    Plan,
    Plans,
    larger_plans,
    smaller_plans,
)
from sparseformer.kernels.entmax_attention.blocks import Blocks, padded_dim
from sparseformer.kernels.entmax_attention.masks import keep_bound
from sparseformer.kernels.entmax_attention.row_bounds import RowBounds

R = TypeVar("R")

# The values of eps = alpha - 1 whose powers need no logarithm.
SHORT_EPS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Problem:
    """One backward pass, its tensors ready for the kernels.

    Attributes:
        query: [B, Hq, Lq, D], any strides, as key, value and grad_output [B, Hq, Lq, Dv].
        bias: [Hq, Lq + Lk - 1] contiguous, or None.
        alpha: [Hq], fp32 or float64; None where eps is one of SHORT_EPS.
        eps: alpha - 1 where one of SHORT_EPS, else None.
        threshold: [B, Hq, Lq].
        delta: [B, Hq, Lq], sum u dP / sum u.
        bits: int32 [B, Hq, query blocks, words], active tiles.
        bounds: the keys that each query sees.
        common: int32 [B', query blocks, 2], the keys that every query of a block sees.
        seed: int64 [], or None without dropout.
        dropout_p: in [0, 1).
        scale: of the scores.
        blocks: the tile that a bit stands for.
        plans: how each kernel is launched.
        case: of launch_case.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    bias: Tensor | None
    alpha: Tensor | None
    eps: float | None
    threshold: Tensor
    delta: Tensor
    bits: Tensor
    bounds: RowBounds
    common: Tensor
    seed: Tensor | None
    dropout_p: float
    scale: float
    blocks: Blocks
    plans: Plans
    case: tuple[Hashable, ...]

    @property
    def num_key_blocks(self) -> int:
        """Return the blocks of keys."""
        return cdiv(self.key.shape[2], self.blocks.keys)

    def pointers(self) -> dict[str, Any]:
        """Return the inputs of a kernel."""
        return {
            "query_ptr": self.query,
            "key_ptr": self.key,
            "value_ptr": self.value,
            "grad_output_ptr": self.grad_output,
            "bias_ptr": self.bias,
            "alpha_ptr": self.alpha,
            "threshold_ptr": self.threshold,
            "delta_ptr": self.delta,
            "rows_ptr": self.bounds.rows,
            "spans_ptr": self.bounds.spans,
            "seed_ptr": self.seed,
        }

    def strides(self) -> dict[str, int]:
        """Return the strides of the inputs that may have any."""
        return (
            named_strides("q", self.query)
            | named_strides("k", self.key)
            | named_strides("v", self.value)
            | named_strides("g", self.grad_output)
        )

    def numbers(self) -> dict[str, Any]:
        """Return sizes and scalars."""
        heads = self.query.shape[1]
        keep = 1.0 - self.dropout_p
        return {
            "bounds_step": self.bounds.batch_stride(),
            "heads": heads,
            "group": heads // self.key.shape[1],
            "num_queries": self.query.shape[2],
            "num_keys": self.key.shape[2],
            "scale": self.scale,
            "keep_scale": 1.0 / keep,
            "keep_bound": keep_bound(self.dropout_p),
        }

    def launch(self, kernel: str, plan: Plan, run: Callable[[Plan], R]) -> R:
        """Run a kernel with its plan or the one that suits the card better."""
        return launch_chosen(
            f"attention backward {kernel}",
            self.query.device,
            self.case,
            smaller_plans(plan),
            run,
            larger=larger_plans(plan, self.blocks.keys),
        )

    def columns(self, plan: Plan) -> int:
        """Return the keys that a kernel computes at once."""
        return min(plan.columns, self.blocks.keys)

    def constants(self, plan: Plan) -> dict[str, Any]:
        """Return what a kernel is compiled for."""
        dim, value_dim = self.query.shape[3], self.value.shape[3]
        return {
            "EPS": self.eps,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "BLOCK_M": min(plan.rows or self.blocks.queries, self.blocks.queries),
            "BLOCK_N": self.columns(plan),
            "TILE_N": self.blocks.keys,
            "BLOCK_D": padded_dim(dim),
            "BLOCK_V": padded_dim(value_dim),
            "HAS_DROPOUT": self.dropout_p > 0.0,
            "ACC": tl.float64 if self.query.dtype == torch.float64 else tl.float32,
        }


def named_strides(name: str, tensor: Tensor | None) -> dict[str, int]:
    """Return the strides of [B, H, L, D] as arguments of a kernel, 0 where there is no tensor."""
    strides = (0, 0, 0, 0) if tensor is None else tensor.stride()
    return {f"stride_{name}{letter}": n for letter, n in zip("bhld", strides, strict=True)}


def split_alpha(arguments: Arguments, dtype: torch.dtype) -> tuple[Tensor | None, float | None]:
    """Return alpha [Hq] of this dtype and None, or None and eps where that is one of SHORT_EPS."""
    if arguments.alpha is not None:
        return arguments.alpha.to(dtype).contiguous(), None
    eps = arguments.parameter - 1.0
    if eps in SHORT_EPS:
        return None, eps
    heads = arguments.query.shape[1]
    return arguments.query.new_full((heads,), arguments.parameter, dtype=dtype), None
