"""Truncated cross-entropy on logits, called like torch.nn.functional.cross_entropy."""

from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.sparse_loss.autograd import LogitsForward, logits_loss
from sparseformer.kernels.sparse_loss.checks import Reduction, check_options, check_truncation
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.shared import (
    DEFAULT_K,
    LossStats,
    check_logits,
    check_loss_backend,
    check_target,
    loss_stats,
    reduced,
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
    backend: Backend = "auto",
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
        backend: "auto", "pytorch" or "triton"; auto is Triton on a GPU that can run it.

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 logits. A row
        whose logits are all -inf has loss 0 and no gradient.

    Raises:
        ValueError: an argument is out of range, a target is no class, or a logit is NaN or +inf;
            the position and the value are named. On a GPU, where looking at the logits would
            wait for the device, such a logit makes the loss NaN.

    Source: the set of top_p is that of nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).
    """
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    name = "sparse_cross_entropy"
    return reduced(_evaluate(name, logits, target, k, top_p, *options), reduction)


def sparse_cross_entropy_with_stats(
    logits: Tensor,
    target: Tensor,
    *,
    k: int | None = None,
    top_p: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LossStats]:
    """Compute sparse_cross_entropy, and say what it kept, without waiting for the device.

    Args:
        logits: [..., V], this and all that follow as for sparse_cross_entropy.
        target: [...] class ids or [..., V] distributions.
        k: classes that the sum keeps, in [1, V].
        top_p: softmax mass that the sum keeps, in (0, 1].
        ignore_index: class id of rows that don't count.
        reduction: "none", "mean" or "sum".
        label_smoothing: share of the target's mass that is spread, in [0, 1].
        weight: [V], 0 or more.
        backend: "auto", "pytorch" or "triton".

    Returns:
        What sparse_cross_entropy returns, and the LossStats of its rows.

    Raises:
        ValueError: as sparse_cross_entropy.
    """
    options = (ignore_index, reduction, label_smoothing, weight, backend)
    name = "sparse_cross_entropy_with_stats"
    result = _evaluate(name, logits, target, k, top_p, *options, stats=True)
    return reduced(result, reduction), loss_stats(result)


def _evaluate(
    name: str,
    logits: Tensor,
    target: Tensor,
    k: int | None,
    top_p: float | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    weight: Tensor | None,
    backend: Backend,
    stats: bool = False,
) -> LogitsForward:
    check_logits(name, logits)
    check_loss_backend(name, backend)
    k = DEFAULT_K if k is None and top_p is None else k
    check_truncation(name, k, top_p, logits.shape[-1])
    check_options(name, reduction, label_smoothing)
    check_target(name, target, tuple(logits.shape), weight, logits)
    rule = Rule(name, k, top_p, None, label_smoothing, ignore_index, backend)
    return logits_loss(logits, None, target, weight, rule, stats)
