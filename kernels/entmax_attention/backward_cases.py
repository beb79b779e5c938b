"""The shipped configurations of the backward kernels, for the compile gate."""

from typing import Any

import torch
import triton.language as tl

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax_attention.backward import _row_deltas_kernel
from sparseformer.kernels.entmax_attention.backward_bias import (
    _entmax_attention_backward_bias_kernel,
)
from sparseformer.kernels.entmax_attention.backward_key import (
    _entmax_attention_backward_key_kernel,
)
from sparseformer.kernels.entmax_attention.backward_plans import plans_for
from sparseformer.kernels.entmax_attention.backward_query import (
    _entmax_attention_backward_query_kernel,
)
from sparseformer.kernels.entmax_attention.blocks import blocks_for, padded_dim
from sparseformer.kernels.entmax_attention.tile_lists import LAUNCH, _list_active_tiles_kernel

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "query": (_entmax_attention_backward_query_kernel, {"WANT_QUERY": True}),
    "key": (_entmax_attention_backward_key_kernel, {"WANT_KEY": True, "WANT_VALUE": True}),
    "bias": (_entmax_attention_backward_bias_kernel, {}),
}
# dtype, D, eps, relative bias and dropout; eps is None for a learned alpha, the largest kernels
SHIPPED: tuple[tuple[str, int, float | None, bool], ...] = (
    *(("bf16", dim, None, extras) for dim in (64, 128, 256) for extras in (False, True)),
    *(("fp32", dim, None, True) for dim in (64, 128, 256)),
    ("bf16", 64, 0.0, False),
    ("bf16", 64, 0.5, False),
    ("bf16", 64, 1.0, False),
    ("bf16", 128, 0.5, False),
    ("fp16", 64, None, False),
    ("fp16", 40, None, False),
    ("fp16", 40, 0.5, True),
    ("fp16", 40, 0.5, False),
    ("fp32", 64, 0.5, False),
)


def backward_cases() -> list[CompileCase]:
    """Return every kernel of the backward pass with its dtypes, widths and options."""
    cases: list[CompileCase] = []
    for dtype, dim, eps, extras in SHIPPED:
        names = [name for name in KERNELS if name != "bias" or extras]
        cases += [_case(name, dtype, dim, eps, extras) for name in names]
    return [*cases, *(_delta_case(dtype) for dtype in DTYPES), _list_case(True), _list_case(False)]


def warp_group_cases() -> list[CompileCase]:
    """Return what ships instead for GPUs that multiply by warp groups, sm_90 and sm_100."""
    return [
        _case(name, dtype, dim, eps, False, has_warp_groups=True)
        for name in ("query", "key")
        for dtype, dim in (("bf16", 64), ("fp16", 40))
        for eps in (None, 0.0, 0.5, 1.0)
    ]


def _case(
    name: str,
    dtype: str,
    dim: int,
    eps: float | None,
    extras: bool,
    has_warp_groups: bool = False,
) -> CompileCase:
    kernel, constants = KERNELS[name]
    blocks = blocks_for(DTYPES[dtype], dim, dim)
    plans = plans_for(DTYPES[dtype], dim, dim, eps, extras, has_warp_groups)
    plan = plans._asdict()[name]
    constants = constants | {
        "EPS": eps,
        "DIM": dim,
        "VALUE_DIM": dim,
        "BLOCK_M": min(plan.rows or blocks.queries, blocks.queries),
        "BLOCK_N": min(plan.columns, blocks.keys),
        "TILE_N": blocks.keys,
        "BLOCK_D": padded_dim(dim),
        "BLOCK_V": padded_dim(dim),
        "HAS_DROPOUT": extras,
        "ACC": tl.float32,
    }
    if name == "key":
        constants["TILE_M"] = blocks.queries
    if name == "query":
        constants["WANT_ALPHA"] = eps is None
    if name != "bias":
        constants["HAS_BIAS"] = extras
    names = kernel.arg_names
    given = {"bias_ptr": extras, "seed_ptr": extras}
    given |= {"alpha_ptr": eps is None, "grad_alpha_ptr": eps is None}
    constants |= {arg: None for arg, is_given in given.items() if arg in names and not is_given}
    constants |= {arg: 1 for arg in names if arg.startswith("stride_") and arg.endswith("d")}
    types = {arg: _type(arg, dtype) for arg in names if arg not in constants}
    kind = f"{name} by warp groups" if has_warp_groups else name
    label = f"backward {kind} {dtype} D={dim} eps={eps}" + " bias dropout" * extras
    return CompileCase(label, kernel, types, constants, plan.launch)


def _delta_case(dtype: str) -> CompileCase:
    constants = {"VALUE_DIM": 256, "BLOCK_M": 64, "BLOCK_V": 256, "stride_gd": 1, "stride_dd": 1}
    names = _row_deltas_kernel.arg_names
    types = {arg: _type(arg, dtype) for arg in names if arg not in constants}
    name = f"backward deltas {dtype}"
    return CompileCase(name, _row_deltas_kernel, types, constants, Launch())


def _list_case(by_key: bool) -> CompileCase:
    constants = {"BY_KEY": by_key, "BLOCK": 1024}
    names = _list_active_tiles_kernel.arg_names
    types = {arg: _type(arg, "fp32") for arg in names if arg not in constants}
    name = f"backward lists {'by key' if by_key else 'by query'}"
    return CompileCase(name, _list_active_tiles_kernel, types, constants, LAUNCH)


def _type(arg: str, dtype: str) -> str:
    """Return the Triton type of a run-time parameter."""
    if arg.startswith("stride_"):
        return "i32:16"
    if not arg.endswith("_ptr"):
        return {"scale": "fp32", "keep_scale": "fp32", "keep_bound": "i64"}.get(arg, "i32")
    known = {
        "tiles": "i16",
        "seed": "i64",
        "bounds_q": "i64",
        "bounds_k": "i64",
        "counts": "i32",
        "bits": "i32",
        "rows": "i32",
        "spans": "i32",
        "common": "i32",
    }
    in_fp32 = {"alpha", "threshold", "delta", "grad_alpha", "parts"}
    name = arg.removesuffix("_ptr")
    return "*" + known.get(name, "fp32" if name in in_fp32 else dtype)
