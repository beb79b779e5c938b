"""The losses of entmax.losses: one value for each row, and modules that reduce them."""
# ruff: noqa: N803 - callers pass X by name

from typing import Literal

import torch
from torch import Tensor, nn

from sparseformer import functional
from sparseformer.compat.entmax.root_finding import normmax_bisect

Reduction = Literal["elementwise_mean", "sum", "none"]
_REDUCTIONS = ("elementwise_mean", "sum", "none")
# Targets with this id are left out by every function here, as F.cross_entropy does.
_IGNORE_INDEX = -100


def sparsemax_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    """Compute `sparseformer.functional.sparsemax_loss` of every row.

    Args:
        X: logits [n, classes]; -inf excludes a class.
        target: class ids [n]; -100 leaves a row out, its loss is 0.
        k: accepted and without effect: the result is exact for any support.

    Returns:
        Losses [n], 0 or more; float32, or float64 for float64 logits.

    Raises:
        ValueError: X holds NaN or +inf, or a target is no class; the position is named.
    """
    del k
    return functional.sparsemax_loss(X, target, reduction="none")


def entmax15_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    """Compute `sparseformer.functional.entmax15_loss` of every row.

    Args:
        X: as for sparsemax_loss.
        target: as for sparsemax_loss.
        k: as for sparsemax_loss.

    Returns:
        As sparsemax_loss.

    Raises:
        ValueError: as sparsemax_loss.
    """
    del k
    return functional.entmax15_loss(X, target, reduction="none")


def sparsemax_bisect_loss(X: Tensor, target: Tensor, n_iter: int | None = 50) -> Tensor:
    """Compute `sparseformer.functional.sparsemax_loss` of every row.

    Args:
        X: as for sparsemax_loss.
        target: as for sparsemax_loss.
        n_iter: accepted and without effect: the threshold is exact to rounding.

    Returns:
        As sparsemax_loss.

    Raises:
        ValueError: as sparsemax_loss.
    """
    del n_iter
    return functional.sparsemax_loss(X, target, reduction="none")


def entmax_bisect_loss(
    X: Tensor, target: Tensor, alpha: float | Tensor = 1.5, n_iter: int | None = 50
) -> Tensor:
    """Compute `sparseformer.functional.entmax_loss` of every row, differentiable in a tensor alpha.

    Args:
        X: as for sparsemax_loss.
        target: as for sparsemax_loss.
        alpha: finite, 1 (cross-entropy) or more; a tensor has one value, or one for each row as
            [n, 1] or [n].
        n_iter: as for sparsemax_bisect_loss.

    Returns:
        As sparsemax_loss.

    Raises:
        ValueError: as sparsemax_loss; also for an alpha out of range or of a wrong shape.
    """
    del n_iter
    if isinstance(alpha, Tensor) and alpha.dim() == X.dim() and alpha.size(-1) == 1:
        alpha = alpha.squeeze(-1)
    return functional.entmax_loss(X, target, alpha, reduction="none")


def normmax_bisect_loss(
    X: Tensor, target: Tensor, alpha: float | Tensor = 2, n_iter: int | None = 50
) -> Tensor:
    """Compute the Fenchel-Young loss of normmax: L = <p, z> + 1 - |p|_alpha - z_y, p = normmax(z).

    The gradient is p - q, q the target as a one-hot row.

    Args:
        X: as for sparsemax_loss.
        target: as for sparsemax_loss.
        alpha: finite, above 1; a float, or a tensor of one value or [n, 1], without a gradient.
        n_iter: as for sparsemax_bisect_loss.

    Returns:
        As sparsemax_loss.

    Raises:
        ValueError: as sparsemax_loss; also for an alpha that isn't above 1.

    Source:
        Blondel, Martins and Niculae 2020, "Learning with Fenchel-Young Losses".
    """
    del n_iter
    counted = _counted("normmax_bisect_loss", X, target)
    logits = X.to(torch.promote_types(X.dtype, torch.float32))
    # By the envelope theorem p counts as a constant.
    probs = normmax_bisect(logits, alpha).detach()
    ids = target.where(counted, 0).unsqueeze(-1)
    seen = logits.masked_fill(logits == -torch.inf, 0.0)
    inner = (probs * seen).sum(-1) - logits.gather(-1, ids).squeeze(-1)
    losses = inner + 1 - _norm(probs, alpha)
    # Rounding must not make a loss that is 0 negative; max would also stop the gradient there.
    losses = losses - losses.detach().clamp(max=0.0)
    return losses.where(counted, 0.0)


def _counted(name: str, logits: Tensor, target: Tensor) -> Tensor:
    """Return which rows have a loss: a class as target, and any logit above -inf."""
    if tuple(target.shape) != tuple(logits.shape[:-1]):
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, but class ids of these logits have "
            f"shape {tuple(logits.shape[:-1])}."
        )
    bad = ((target < 0) | (target >= logits.shape[-1])) & (target != _IGNORE_INDEX)
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: target at position {place} is {int(target[place])}, but class ids run from "
            f"0 to {logits.shape[-1] - 1}, and {_IGNORE_INDEX} leaves a row out."
        )
    return (target != _IGNORE_INDEX) & (logits > -torch.inf).any(-1)


def _norm(probs: Tensor, alpha: float | Tensor) -> Tensor:
    power = torch.as_tensor(alpha, dtype=probs.dtype, device=probs.device)
    norms = (probs**power).sum(-1, keepdim=True) ** (1 / power)
    return norms.squeeze(-1)


class _Loss(nn.Module):
    """Reduce the losses of the rows whose target isn't ignore_index."""

    def __init__(
        self, ignore_index: int = _IGNORE_INDEX, reduction: Reduction = "elementwise_mean"
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            allowed = ", ".join(_REDUCTIONS)
            raise ValueError(f"reduction is {reduction!r}, but it must be one of {allowed}.")
        self.ignore_index, self.reduction = ignore_index, reduction

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        """Return the losses [n] of logits [n, classes] and class ids [n]."""
        raise NotImplementedError

    def forward(self, X: Tensor, target: Tensor) -> Tensor:
        """Return losses [n], or their sum or mean over the rows that count (0 without any)."""
        ignored = (target == self.ignore_index) | (target == _IGNORE_INDEX)
        losses = self.loss(X, target.masked_fill(ignored, _IGNORE_INDEX))
        if self.reduction == "none":
            return losses
        total = losses.sum()
        if self.reduction == "sum":
            return total
        return total / (~ignored).sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"


class SparsemaxLoss(_Loss):
    """Module form of `sparsemax_loss`."""

    def __init__(
        self,
        k: int | None = None,
        ignore_index: int = _IGNORE_INDEX,
        reduction: Reduction = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.k = k

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return sparsemax_loss(X, target, self.k)


class Entmax15Loss(_Loss):
    """Module form of `entmax15_loss`."""

    def __init__(
        self,
        k: int | None = 100,
        ignore_index: int = _IGNORE_INDEX,
        reduction: Reduction = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.k = k

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return entmax15_loss(X, target, self.k)


class SparsemaxBisectLoss(_Loss):
    """Module form of `sparsemax_bisect_loss`."""

    def __init__(
        self,
        n_iter: int | None = 50,
        ignore_index: int = _IGNORE_INDEX,
        reduction: Reduction = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.n_iter = n_iter

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return sparsemax_bisect_loss(X, target, self.n_iter)


class EntmaxBisectLoss(_Loss):
    """Module form of `entmax_bisect_loss`; an nn.Parameter as alpha is learned with the module."""

    def __init__(
        self,
        alpha: float | Tensor = 1.5,
        n_iter: int | None = 50,
        ignore_index: int = _IGNORE_INDEX,
        reduction: Reduction = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.alpha, self.n_iter = alpha, n_iter

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return entmax_bisect_loss(X, target, self.alpha, self.n_iter)


class NormmaxBisectLoss(EntmaxBisectLoss):
    """Module form of `normmax_bisect_loss`."""

    def __init__(
        self,
        alpha: float | Tensor = 2,
        n_iter: int | None = 50,
        ignore_index: int = _IGNORE_INDEX,
        reduction: Reduction = "elementwise_mean",
    ) -> None:
        super().__init__(alpha, n_iter, ignore_index, reduction)

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return normmax_bisect_loss(X, target, self.alpha, self.n_iter)
