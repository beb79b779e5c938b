"""Every shipped configuration of the row kernels of entmax, for the compile gate."""

from collections.abc import Iterator
from typing import Any

import torch

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.entmax.backward import (
    _gradient_long_kernel,
    _gradient_tile_kernel,
)
from sparseformer.kernels.entmax.forward import MAX_TILE, _entmax_tile_kernel, tile_shape
from sparseformer.kernels.entmax.long_rows import MAX_BLOCK, _entmax_long_kernel, long_launch
from sparseformer.kernels.entmax.row_input import precision

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Name, EPS, and whether alpha is a tensor.
_ALPHAS = [
    ("softmax", 0.0, False),
    ("1.5", 0.5, False),
    ("sparsemax", 1.0, False),
    ("any float", None, False),
    ("learned", None, True),
]


def compile_cases() -> list[CompileCase]:
    """Return every kernel with every kind of alpha, each in fp32, fp16 and bf16 in this order."""
    by_dtype = [
        [
            case
            for name, eps, learned in _ALPHAS
            for case in _cases(dtype, f"{dtype} {name}", eps, learned)
        ]
        for dtype in _DTYPES
    ]
    return [case for same_but_dtype in zip(*by_dtype, strict=True) for case in same_but_dtype]


def _cases(dtype: str, name: str, eps: float | None, learned: bool) -> Iterator[CompileCase]:
    types = {"length": "i32", "eps": "fp32", "stride_alpha": "i32"}
    constants: dict[str, Any] = {"EPS": eps, **precision(_DTYPES[dtype]), "alpha_ptr": None}
    if learned:
        types["alpha_ptr"] = "*fp32"
        del constants["alpha_ptr"]
    forward = {
        **types,
        "scores_ptr": f"*{dtype}",
        "probs_ptr": f"*{dtype}",
        "stride_scores_row": "i32",
    }
    backward = {
        **types,
        "probs_ptr": f"*{dtype}",
        "grad_ptr": f"*{dtype}",
        "d_scores_ptr": f"*{dtype}",
        "d_alpha_ptr": "*fp32",
        "stride_grad_row": "i32",
    }
    forward_constants = {**constants, "stride_scores_col": 1}
    backward_constants = {**constants, "stride_grad_col": 1}
    for length in (100, 2048, MAX_TILE):
        yield _tile(
            f"forward {length} {name}", _entmax_tile_kernel, length, forward, forward_constants
        )
    for length in (100, 2048, MAX_TILE):
        yield _tile(
            f"backward {length} {name}", _gradient_tile_kernel, length, backward, backward_constants
        )
    yield _long(f"forward long {name}", _entmax_long_kernel, forward, forward_constants)
    yield _long(f"backward long {name}", _gradient_long_kernel, backward, backward_constants)


def _tile(
    name: str, kernel: Any, length: int, types: dict[str, str], constants: dict[str, Any]
) -> CompileCase:
    block_rows, block_n, launch = tile_shape(length)
    shape = {"BLOCK_ROWS": block_rows, "BLOCK_N": block_n}
    return CompileCase(name, kernel, {**types, "num_rows": "i32"}, {**constants, **shape}, launch)


def _long(name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> CompileCase:
    launch = long_launch(MAX_BLOCK)
    return CompileCase(name, kernel, types, {**constants, "BLOCK_N": MAX_BLOCK}, launch)
