"""What the row kernels of entmax are given: scores of any dtype, and alpha in each of its forms."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# alpha - 1 of the shorter ways.
_FIXED = (0.0, 0.5, 1.0)


class RowAlpha(NamedTuple):
    """One alpha for all rows or one for each, as the kernels take it.

    Attributes:
        fixed: alpha - 1 where a shorter way exists, else None.
        eps: alpha - 1 where it is one number for all rows.
        tensor: alpha, where it lies on the device.
        stride: of tensor, 0 where all rows share its entry.
    """

    fixed: float | None
    eps: float
    tensor: Tensor | None
    stride: int


def split_alpha(alpha: float | Tensor, scores: Tensor) -> RowAlpha:
    """Sort alpha into its forms without reading a tensor."""
    if isinstance(alpha, Tensor):
        return RowAlpha(None, 0.0, alpha, alpha.stride(0) if alpha.numel() > 1 else 0)
    eps = float(alpha) - 1.0
    eps = eps if eps >= precision(scores.dtype)["ROUNDING"] else 0.0
    if eps in _FIXED:
        return RowAlpha(eps, eps, None, 0)
    if scores.dtype == torch.float64:
        # A float argument of a kernel is fp32.
        return RowAlpha(None, 0.0, scores.new_full((1,), alpha), 0)
    return RowAlpha(None, eps, None, 0)


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """Return COMPUTE, the dtype that scores of this dtype are computed in, and its ROUNDING."""
    double = dtype == torch.float64
    return {
        "COMPUTE": tl.float64 if double else tl.float32,
        "ROUNDING": torch.finfo(torch.float64 if double else torch.float32).eps,
    }


@triton.jit
def load_tile(
    row_ptr,
    start,
    length,
    stride,
    other: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load the part of one row that starts at column start."""
    cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
    return tl.load(row_ptr + cols * stride, mask=cols < length, other=other).to(COMPUTE)


@triton.jit
def load_eps(
    alpha_ptr, offsets, mask, eps, EPS: tl.constexpr, COMPUTE: tl.constexpr, ROUNDING: tl.constexpr
):
    """Return alpha - 1 of every row, shaped as mask; an alpha of 1 becomes 1 + rounding."""
    if EPS is not None:
        result = tl.full(mask.shape, EPS, COMPUTE)
    elif alpha_ptr is None:
        result = tl.full(mask.shape, 0.0, COMPUTE) + eps
    else:
        loaded = tl.load(alpha_ptr + offsets, mask=mask, other=2.0).to(COMPUTE) - 1.0
        result = tl.where(loaded < ROUNDING, ROUNDING, loaded)
    return result


@triton.jit
def store_tile(row_ptr, start, length, values, BLOCK_N: tl.constexpr):
    """Store the part of one contiguous row that starts at column start, in the row's dtype."""
    cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
    tl.store(row_ptr + cols, values.to(row_ptr.dtype.element_ty), mask=cols < length)
