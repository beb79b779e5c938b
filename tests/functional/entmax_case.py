"""What tests of entmax share: seeded scores, and the mapping by bisection."""

import math

import torch
from torch import Tensor

# Fast paths, general values, softmax's neighbourhood, and one above sparsemax.
ALPHAS = (1.0, 1.0001, 1.05, 1.3, 1.5, 1.9, 2.0, 3.0)


def scores(
    *shape: int, scale: float = 2.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def bisect(x: Tensor, alpha: float | Tensor) -> Tensor:
    """Entmax over the last dim by bisection on the mass in float64."""
    x = x.double()
    eps = (torch.as_tensor(alpha, dtype=torch.float64) - 1).clamp(min=1e-13)
    top = x.amax(-1, keepdim=True)
    x = x - torch.where(top.isfinite(), top, 0.0)
    low, high = torch.zeros_like(top), torch.full_like(top, 1 + math.log(x.size(-1)))

    def at(t: Tensor) -> Tensor:
        return (torch.log1p((eps * (x - t)).clamp(min=-1)) / eps).exp()

    for _ in range(70):
        middle = (low + high) / 2
        too_low = at(middle).sum(-1, keepdim=True) > 1
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return at(high)
