"""What the tests of entmax's row kernels share: the oracle, and both regimes at any length."""

import math

import torch
from torch import Tensor

from sparseformer.kernels.entmax import reference
from sparseformer.kernels.entmax.backward import entmax_backward, launch_gradients
from sparseformer.kernels.entmax.forward import entmax_forward, launch_rows
from sparseformer.kernels.entmax.row_input import split_alpha

INF = math.inf
ALPHAS = (1.0, 1.05, 1.2, 1.333, 1.5, 1.9, 2.0)
# Rows longer than this are streamed in the tests of the long regime.
BLOCK = 32
Alpha = float | Tensor


def scores(
    *shape: int, scale: float = 2.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def each_alpha(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(ALPHAS, dtype=torch.float64).to(dtype)


def solve(x: Tensor, alpha: Alpha, long: bool = False) -> Tensor:
    """Run the forward kernel; long streams the rows in blocks of 32."""
    if not long:
        return entmax_forward(x, alpha)
    probs = torch.full(x.shape, math.nan, dtype=x.dtype)
    launch_rows(x, split_alpha(alpha, x), probs, BLOCK)
    return probs


def gradients(
    probs: Tensor, grad: Tensor, alpha: Alpha, long: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the backward kernel; long streams the rows in blocks of 32."""
    if not long:
        d_scores, d_alpha = entmax_backward(probs, grad, alpha, True, True)
        assert d_scores is not None
        assert d_alpha is not None
        return d_scores, d_alpha
    d_scores = torch.full_like(probs, math.nan)
    precise = torch.promote_types(probs.dtype, torch.float32)
    d_alpha = torch.full((len(probs),), math.nan, dtype=precise)
    launch_gradients(probs, grad, split_alpha(alpha, probs), d_scores, d_alpha, BLOCK)
    return d_scores, d_alpha


def exact(x: Tensor, alpha: Alpha) -> Tensor:
    """Return p in float64."""
    if isinstance(alpha, Tensor):
        alpha = alpha.double().expand(len(x))[:, None]
    return reference.entmax_rows(x.double(), alpha)


def plain(x: Tensor, alpha: Alpha) -> Tensor:
    """Return what plain PyTorch makes of rows in their dtype; fp16 is computed in fp32."""
    precise = torch.promote_types(x.dtype, torch.float32)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(precise).expand(len(x))[:, None]
    return reference.entmax_rows(x.to(precise), alpha).to(x.dtype)
