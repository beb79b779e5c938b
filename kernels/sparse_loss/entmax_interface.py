"""The Fenchel-Young losses of entmax on logits, called like torch.nn.functional.cross_entropy."""

import math

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.sparse_loss.autograd import LogitsForward, logits_loss
from sparseformer.kernels.sparse_loss.checks import Reduction, check_alpha, check_options
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.shared import (
    LossStats,
    alpha_like,
    check_logits,
    check_loss_backend,
    check_target,
    loss_stats,
    reduced,
)


def entmax_loss(
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the Fenchel-Young loss of alpha-entmax.

    `L = <p, z> + H(p) - <q, z> - H(q)` with `p = entmax(z, alpha)`, q the target distribution
    (one-hot for a class id, H(q) = 0) and `H(p) = (1 - sum_j p_j^alpha) / (alpha (alpha - 1))`.
    The gradient is `p - q`: zero outside the support. L is never negative, and 0 exactly when
    p = q: for a class id, when its logit leads by 1 / (alpha - 1). At alpha = 1 and class ids this
    is F.cross_entropy; for distributions it is that less their entropy.

    The loss falls as alpha rises, whatever the logits: `dL/dalpha = dH(p)/dalpha - dH(q)/dalpha`
    is at most 0 for class ids. The gradient is exact, but minimising the loss over its own alpha
    only ever drives alpha up; see sparseformer.nn.losses.EntmaxLoss.

    Label smoothing s gives `(1 - s) L(z, q) + s mean_j L(z, e_j)`, F.cross_entropy's at alpha = 1;
    the gradient is then dense by definition.

    Args:
        logits: [..., V], as for sparse_cross_entropy.
        target: [...] class ids or [..., V] distributions, as for sparse_cross_entropy.
        alpha: 1 or more: a float, or a tensor that broadcasts to [...] (one for each row);
            1 is softmax, 2 is sparsemax. Differentiable.
        ignore_index: as for sparse_cross_entropy.
        reduction: as for sparse_cross_entropy.
        label_smoothing: share of the target's mass that is spread over all classes, in [0, 1].
        weight: [V], 0 or more, a factor for each class. For distributions, the loss is
            `M L(z, m / M)` with `m_j = weight_j q_j` and M its sum.
        backend: as for sparse_cross_entropy.

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy.

    Source: Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models" (2019, arXiv
    1905.05702); Peters and Martins, "Smoothing and Shrinking the Sparse Seq2Seq Search Space"
    (2021, arXiv 2103.10291) for the smoothing.
    """
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    return reduced(_evaluate("entmax_loss", logits, target, alpha, *options), reduction)


def entmax_loss_with_stats(
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LossStats]:
    """Compute entmax_loss, and say what its support is, without waiting for the device.

    Args:
        logits: [..., V], this and all that follow as for entmax_loss.
        target: [...] class ids or [..., V] distributions.
        alpha: 1 or more: a float, or a tensor that broadcasts to [...].
        ignore_index: class id of rows that don't count.
        reduction: "none", "mean" or "sum".
        label_smoothing: share of the target's mass that is spread, in [0, 1].
        weight: [V], 0 or more.
        backend: "auto", "pytorch" or "triton".

    Returns:
        What entmax_loss returns, and the LossStats of its rows.

    Raises:
        ValueError: as entmax_loss.
    """
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    result = _evaluate("entmax_loss_with_stats", logits, target, alpha, *options, stats=True)
    return reduced(result, reduction), loss_stats(result)


def sparsemax_loss(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the sparsemax loss, which is entmax_loss at alpha = 2.

    `L = 1/2 + 1/2 sum_{j : p_j > 0} (z_j^2 - tau^2) - z_y` for a class id y, with tau the threshold
    of `p = sparsemax(z)`; zero from a margin of 1.

    Args:
        logits: [..., V], as for sparse_cross_entropy.
        target: [...] class ids or [..., V] distributions, as for sparse_cross_entropy.
        ignore_index: as for sparse_cross_entropy.
        reduction: as for sparse_cross_entropy.
        label_smoothing: as for entmax_loss.
        weight: as for entmax_loss.
        backend: as for sparse_cross_entropy.

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy.

    Source: Martins and Astudillo, "From Softmax to Sparsemax" (2016, arXiv 1602.02068).
    """
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    return reduced(_evaluate("sparsemax_loss", logits, target, 2.0, *options), reduction)


def entmax15_loss(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the 1.5-entmax loss, which is entmax_loss at alpha = 1.5.

    `L = <p, z> + 4/3 (1 - sum_j p_j^1.5) - z_y` for a class id y and `p = entmax15(z)`; zero from a
    margin of 2.

    Args:
        logits: [..., V], as for sparse_cross_entropy.
        target: [...] class ids or [..., V] distributions, as for sparse_cross_entropy.
        ignore_index: as for sparse_cross_entropy.
        reduction: as for sparse_cross_entropy.
        label_smoothing: as for entmax_loss.
        weight: as for entmax_loss.
        backend: as for sparse_cross_entropy.

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy.

    Source: Peters, Niculae and Martins (2019, arXiv 1905.05702).
    """
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    return reduced(_evaluate("entmax15_loss", logits, target, 1.5, *options), reduction)


def am_softmax_loss(
    logits: Tensor,
    target: Tensor,
    *,
    margin: float = 0.35,
    scale: float = 30.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the additive-margin softmax loss: cross-entropy of `scale (cos_j - margin [j = y])`.

    Args:
        logits: [..., V] cosines in [-1, 1] of the features and the class weights, as
            `F.linear(F.normalize(features), F.normalize(class_weights))` makes them. -inf
            excludes a class.
        target: [...] class ids in [0, V), or ignore_index.
        margin: what the target's cosine must lead by, finite and 0 or more.
        scale: factor of the cosines, above 0.
        ignore_index: as for sparse_cross_entropy.
        reduction: as for sparse_cross_entropy.
        label_smoothing: share of the target's mass that is spread over all classes, in [0, 1].
        weight: [V], 0 or more, a factor for each class as in F.cross_entropy.
        backend: as for sparse_cross_entropy.

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy; also for distributions as targets.

    Source: Wang, Cheng, Liu and Liu, "Additive Margin Softmax for Face Verification" (2018, arXiv
    1801.05599).
    """
    name = "am_softmax_loss"
    check_logits(name, logits)
    if not 0.0 <= margin < math.inf:
        raise ValueError(f"{name}: margin is {margin!r}, but it must be finite and 0 or more.")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"{name}: scale is {scale!r}, but it must be above 0 and finite.")
    if target.is_floating_point():
        raise ValueError(
            f"{name}: target has dtype {target.dtype}, but a margin needs class ids; "
            "use entmax_loss with alpha = 1 for distributions."
        )
    # Before the ids are used as places; the operator looks at their values.
    check_target(name, target, tuple(logits.shape), weight, logits)
    cosines = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # An ignored row may get its margin anywhere: its logits are never read.
    ids = target.long().clamp(min=0, max=logits.shape[-1] - 1)[..., None]
    margins = torch.zeros_like(cosines).scatter_(-1, ids, margin)
    scaled = scale * (cosines - margins)
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    return reduced(_evaluate(name, scaled, target, 1.0, *options), reduction)


def _evaluate(
    name: str,
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    weight: Tensor | None,
    backend: Backend,
    stats: bool = False,
) -> LogitsForward:
    check_logits(name, logits)
    check_loss_backend(name, backend)
    check_alpha(name, alpha, tuple(logits.shape[:-1]))
    check_options(name, reduction, label_smoothing)
    check_target(name, target, tuple(logits.shape), weight, logits)
    fixed = None if isinstance(alpha, Tensor) else float(alpha)
    rule = Rule(name, None, None, fixed, label_smoothing, ignore_index, backend)
    return logits_loss(logits, alpha_like(alpha, logits), target, weight, rule, stats)
