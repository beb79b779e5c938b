"""The Tsallis entropy of a distribution and its slope in alpha, exact at alpha = 1 too."""

import torch
from torch import Tensor

# Below this |x| the closed form of the slope cancels; ten terms of its series are exact to 2e-13.
_SERIES_RADIUS = 0.3
_SERIES = tuple(
    (m + 1) / factorial
    for m, factorial in enumerate((2, 6, 24, 120, 720, 5040, 40320, 362880, 3628800, 39916800))
)


def tsallis_entropy(p: Tensor, alpha: float | Tensor) -> Tensor:
    """Return `H_alpha(p) = (1 - sum p^alpha) / (alpha (alpha - 1))` of each row; Shannon's at 1.

    Args:
        p: [n, V], non-negative.
        alpha: a float, or a tensor that broadcasts with p and has size 1 in its last dimension.
    """
    log_p = _log(p)
    x = (alpha - 1.0) * log_p
    ratio = torch.where(x == 0, 1.0, x.expm1() / x)
    return -(p * log_p * ratio / alpha).sum(-1)


def entropy_slope(p: Tensor, entropy: Tensor, alpha: float | Tensor) -> Tensor:
    """Return `dH_alpha(p) / dalpha` at fixed p, which is never above 0.

    With L = log p and x = (alpha - 1) L it is `-(H + sum p L^2 psi(x)) / alpha`,
    `psi(x) = (x e^x - e^x + 1) / x^2 = 1/2 + x/3 + x^2/8 + ...`

    Args:
        p: [n, V], non-negative.
        entropy: [n], H_alpha(p).
        alpha: a float, or a tensor that broadcasts with p and has size 1 in its last dimension.
    """
    log_p = _log(p)
    curvature = (p * log_p.square() * _psi((alpha - 1.0) * log_p)).sum(-1)
    alpha = alpha.squeeze(-1) if isinstance(alpha, Tensor) else alpha
    return -(entropy + curvature) / alpha


def _log(p: Tensor) -> Tensor:
    return torch.where(p > 0, p, 1.0).log()


def _psi(x: Tensor) -> Tensor:
    small = x.abs() < _SERIES_RADIUS
    near = torch.where(small, x, 0.0)
    series = torch.zeros_like(x)
    for coefficient in reversed(_SERIES):
        series = series * near + coefficient
    far = torch.where(small, 1.0, x)
    return torch.where(small, series, (far * far.exp() - far.expm1()) / far.square())
