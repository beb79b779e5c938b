"""The shipped configurations of the forward kernels and, with the backward's, of the package."""

from typing import Any

import torch
import triton.language as tl

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax_attention import backward_cases as backward
from sparseformer.kernels.entmax_attention.blocks import Blocks, blocks_for, padded_dim
from sparseformer.kernels.entmax_attention.decode_kernels import (
    _entmax_attention_decode_output_kernel,
    _entmax_attention_decode_scores_kernel,
    _entmax_attention_decode_threshold_kernel,
)
from sparseformer.kernels.entmax_attention.forward_decode import DEPTH, LANES, ROW_LAUNCH
from sparseformer.kernels.entmax_attention.forward_one_tile import _entmax_attention_one_tile_kernel
from sparseformer.kernels.entmax_attention.forward_output import _entmax_attention_output_kernel
from sparseformer.kernels.entmax_attention.forward_sketch import _entmax_attention_sketch_kernel
from sparseformer.kernels.entmax_attention.forward_softmax import _softmax_attention_forward_kernel
from sparseformer.kernels.entmax_attention.launch_table import (
    DECODE_LAUNCH,
    MAX_DECODE_ROWS,
    decode_keys,
    max_span,
    one_tile_launch,
    plan_for,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# dtype, D, eps, relative bias, dropout
SHIPPED: tuple[tuple[str, int, float | None, bool, bool], ...] = (
    *(
        (dtype, dim, eps, False, False)
        for dtype in ("fp32", "bf16")
        for dim in (64, 128, 256)
        for eps in (None, 0.5)
    ),
    ("fp16", 64, None, False, False),
    ("bf16", 64, 1.0, False, False),
    ("bf16", 64, None, False, True),
    ("bf16", 64, 0.5, False, True),
    ("bf16", 64, None, True, True),
    ("bf16", 128, None, True, True),
    ("fp32", 64, None, True, True),
    ("fp16", 40, 0.5, True, False),
)
NUMBERS = {"scale": "fp32", "keep_scale": "fp32", "keep_bound": "i64"}
POINTERS = {
    "bias": "fp32",
    "alpha": "fp32",
    "rows": "i32",
    "spans": "i32",
    "seed": "i64",
    "threshold": "fp32",
    "words": "i32",
    "refine": "i32",
    "scores": "fp32",
    "parts": "fp32",
    "masses": "fp32",
}


def compile_cases() -> list[CompileCase]:
    """Return every kernel of both passes with its dtypes, widths and options."""
    return [*forward_cases(), *backward.backward_cases()]


def forward_cases() -> list[CompileCase]:
    """Return every kernel of the forward pass."""
    cases = [case for shipped in SHIPPED for case in _entmax_cases(*shipped)]
    cases += [_softmax_case(dtype, dim) for dtype in DTYPES for dim in (64, 256)]
    return cases + [
        case for dtype in DTYPES for dim in (64, 256) for case in _decode_cases(dtype, dim)
    ]


def _entmax_cases(
    dtype: str,
    dim: int,
    eps: float | None,
    has_bias: bool,
    has_dropout: bool,
) -> list[CompileCase]:
    blocks = blocks_for(DTYPES[dtype], dim, dim)
    options = _constants(dim, eps, has_bias, has_dropout)
    label = f"{dtype} D={dim} eps={eps}" + " bias" * has_bias + " dropout" * has_dropout
    span = max_span(DTYPES[dtype], dim, has_bias or has_dropout)
    kept, dropped = (
        plan_for(DTYPES[dtype], dim, eps, keep, has_bias, has_dropout) for keep in (True, False)
    )
    tile = {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys}
    sketch = {**options, **tile, "DEPTH": kept.depth}
    one_tile = {**options, **tile, "BLOCK_N": span, "TILE_KEYS": blocks.keys, "KEEP": True}
    kept_output, output = ({**options, **tile, "KEEP": keep} for keep in (True, False))
    rows: list[tuple[str, Any, dict[str, Any], Launch]] = [
        ("sketch", _entmax_attention_sketch_kernel, sketch, kept.sketch_launch),
        ("output", _entmax_attention_output_kernel, kept_output, kept.launch),
        ("inference", _entmax_attention_output_kernel, output, dropped.launch),
        (
            "one tile",
            _entmax_attention_one_tile_kernel,
            one_tile,
            one_tile_launch(span, blocks, eps),
        ),
    ]
    return [_case(f"forward {name} {label}", dtype, *rest) for name, *rest in rows]


def _softmax_case(dtype: str, dim: int) -> CompileCase:
    blocks = blocks_for(DTYPES[dtype], dim, dim)
    constants = _constants(dim, 0.0, False, False)
    constants |= {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "KEEP": True}
    launch = plan_for(DTYPES[dtype], dim, 0.0, True, False, False).launch
    name = f"forward softmax {dtype} D={dim}"
    return _case(name, dtype, _softmax_attention_forward_kernel, constants, launch)


def _decode_cases(dtype: str, dim: int) -> list[CompileCase]:
    blocks = Blocks(padded_dim(MAX_DECODE_ROWS), decode_keys(DTYPES[dtype], dim))
    constants = _constants(dim, None, True, True)
    constants |= {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "LANES": LANES, "DEPTH": DEPTH}
    kernels = {
        "scores": (_entmax_attention_decode_scores_kernel, DECODE_LAUNCH),
        "threshold": (_entmax_attention_decode_threshold_kernel, ROW_LAUNCH),
        "output": (_entmax_attention_decode_output_kernel, DECODE_LAUNCH),
    }
    return [
        _case(f"forward decode {name} {dtype} D={dim}", dtype, kernel, constants, launch)
        for name, (kernel, launch) in kernels.items()
    ]


def _constants(dim: int, eps: float | None, has_bias: bool, has_dropout: bool) -> dict[str, Any]:
    """Return constexpr parameters of a problem; None for a pointer that isn't given."""
    absent = {"bias_ptr": not has_bias, "alpha_ptr": eps is not None, "seed_ptr": not has_dropout}
    return {
        **{f"stride_{tensor}d": 1 for tensor in "qkvo"},
        **{name: None for name, is_absent in absent.items() if is_absent},
        "EPS": eps,
        "DIM": dim,
        "VALUE_DIM": dim,
        "BLOCK_D": padded_dim(dim),
        "BLOCK_V": padded_dim(dim),
        "HAS_BIAS": has_bias,
        "HAS_DROPOUT": has_dropout,
        "ACC": tl.float32,
        "EXCESS": 1e-2,
        "DOUBT": 1e-2,
        "CLOSE": 5e-2,
        "ROUNDING": 2.0**-22,
    }


def _case(
    name: str, dtype: str, kernel: Any, constants: dict[str, Any], launch: Launch
) -> CompileCase:
    absent = {} if constants.get("KEEP", True) else {"direction_ptr": None}
    known = {arg: x for arg, x in {**constants, **absent}.items() if arg in kernel.arg_names}
    types = {arg: _type(arg, dtype) for arg in kernel.arg_names if arg not in known}
    return CompileCase(name, kernel, types, known, launch)


def _type(arg: str, dtype: str) -> str:
    """Return the Triton type of a run-time parameter."""
    if arg.startswith("stride_"):
        return "i32:16"
    if arg.endswith("_ptr"):
        return "*" + POINTERS.get(arg.removesuffix("_ptr"), dtype)
    return NUMBERS.get(arg, "i32")
