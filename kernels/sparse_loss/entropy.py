"""The Tsallis entropy of a distribution and its slope in alpha, exact at alpha = 1 too."""

import torch
from torch import Tensor

# For x from -0.3 to 0 the closed form of psi cancels; ten terms of its series are exact to 2e-13.
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
    ratio = (x.expm1() / x).nan_to_num_(nan=1.0)
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
    # At p = 0 any finite value does: it is multiplied by p.
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_()


def _psi(x: Tensor) -> Tensor:
    near = x.clamp(min=-_SERIES_RADIUS)
    series = torch.full_like(x, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series.mul_(near).add_(coefficient)
    # 0 / 0 at x = 0 is not chosen.
    far = (x * x.exp()).sub_(x.expm1()).div_(x.square())
    return torch.where(x > -_SERIES_RADIUS, series, far)
