"""Sparse losses on logits, called like torch.nn.functional.cross_entropy."""

import math

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.autograd import LogitsLoss
from sparseformer.kernels.sparse_loss.checks import (
    Reduction,
    check_alpha,
    check_options,
    check_truncation,
)
from sparseformer.kernels.sparse_loss.reference import Truncation
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.shared import (
    DEFAULT_K,
    check_logits,
    check_target,
    counted_rows,
    flat_alpha,
    flat_target,
    reduce_losses,
)


def sparse_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    k: int | None = None,
    top_p: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the cross-entropy whose log-partition sums over the largest logits only.

    `L = logsumexp(z_j : j in Omega) - z_y`, with Omega the k largest logits, or the smallest set
    of largest logits that holds the softmax mass top_p. The gradient is `p_j` on Omega and -1 on
    the target y, which is always read: at most k + 1 classes of a row are touched. Of equal
    logits at the last place the lowest classes stay. With k the number of classes this is
    F.cross_entropy.

    Label smoothing spreads its share evenly over Omega (and not over all classes, which would
    make the gradient dense): `L = logsumexp(Omega) - (1 - s) z_y - s mean(z_j : j in Omega)`.

    Args:
        logits: [..., V] finite, or -inf for an excluded class: the loss is that of the logits
            without it, and +inf if it is the target. Float16 and bfloat16 are summed in float32.
        target: [...] class ids in [0, V), or ignore_index; or [..., V] floating-point
            distributions.
        k: classes that the sum keeps, in [1, V]; 64 when neither k nor top_p is given.
        top_p: softmax mass that the sum keeps, in (0, 1].
        ignore_index: rows with this class id have loss 0 and no gradient, and their logits are
            never read; not used with distributions.
        reduction: "none", "mean" or "sum". The mean is over the rows that count, weighted by
            `weight[target]` for class ids; over no rows it is 0.
        label_smoothing: share of the target's mass that is spread, in [0, 1].
        weight: [V], 0 or more, a factor for each class as in F.cross_entropy.

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 logits. A row
        whose logits are all -inf has loss 0 and no gradient.

    Raises:
        ValueError: an argument is out of range, a target is no class, or a logit is NaN or +inf;
            the position and the value are named.

    Source: the set of top_p is that of nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).
    """
    name = "sparse_cross_entropy"
    check_logits(name, logits)
    k = DEFAULT_K if k is None and top_p is None else k
    check_truncation(name, k, top_p, logits.shape[-1])
    rule = Rule(name, tuple(logits.shape[:-1]), Truncation(k, top_p), None, label_smoothing)
    return _loss(rule, logits, target, None, ignore_index, reduction, weight)


def entmax_loss(
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
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

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy.

    Source: Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models" (2019, arXiv
    1905.05702); Peters and Martins, "Smoothing and Shrinking the Sparse Seq2Seq Search Space"
    (2021, arXiv 2103.10291) for the smoothing.
    """
    options = (ignore_index, reduction, label_smoothing, weight)
    return _entmax_loss("entmax_loss", logits, target, alpha, *options)


def sparsemax_loss(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
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

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy.

    Source: Martins and Astudillo, "From Softmax to Sparsemax" (2016, arXiv 1602.02068).
    """
    options = (ignore_index, reduction, label_smoothing, weight)
    return _entmax_loss("sparsemax_loss", logits, target, 2.0, *options)


def entmax15_loss(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
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

    Returns:
        As sparse_cross_entropy.

    Raises:
        ValueError: as sparse_cross_entropy.

    Source: Peters, Niculae and Martins (2019, arXiv 1905.05702).
    """
    options = (ignore_index, reduction, label_smoothing, weight)
    return _entmax_loss("entmax15_loss", logits, target, 1.5, *options)


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
    check_target(name, target, tuple(logits.shape), weight, ignore_index, logits)
    cosines = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # An ignored row may get its margin anywhere: its logits are never read.
    ids = target.long().clamp(min=0, max=logits.shape[-1] - 1)[..., None]
    margins = torch.zeros_like(cosines).scatter_(-1, ids, margin)
    scaled = scale * (cosines - margins)
    options = (ignore_index, reduction, label_smoothing, weight)
    return _entmax_loss(name, scaled, target, 1.0, *options)


def _entmax_loss(
    name: str,
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    weight: Tensor | None,
) -> Tensor:
    check_logits(name, logits)
    shape = tuple(logits.shape[:-1])
    check_alpha(name, alpha, shape)
    fixed = None if isinstance(alpha, Tensor) else float(alpha)
    rule = Rule(name, shape, None, fixed, label_smoothing)
    rows_alpha = flat_alpha(alpha, shape, logits)
    return _loss(rule, logits, target, rows_alpha, ignore_index, reduction, weight)


def _loss(
    rule: Rule,
    logits: Tensor,
    target: Tensor,
    alpha: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    weight: Tensor | None,
) -> Tensor:
    check_options(rule.name, reduction, rule.label_smoothing)
    check_target(rule.name, target, tuple(logits.shape), weight, ignore_index, logits)
    target = flat_target(target, logits.shape[-1])
    rows = counted_rows(target, ignore_index)
    flat = logits.reshape(-1, logits.shape[-1])
    losses = LogitsLoss.apply(flat, alpha, target, weight, rows, rule)
    return reduce_losses(losses, target, rows, weight, reduction, rule.shape)
