"""Losses on hidden states that also say what they kept."""

from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.sparse_loss.checks import Reduction
from sparseformer.kernels.sparse_loss.linear_call import LinearCall, entmax, truncated
from sparseformer.kernels.sparse_loss.shared import LossStats, loss_stats, reduced


def linear_sparse_cross_entropy_with_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    k: int | None = None,
    top_p: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LossStats]:
    """Compute linear_sparse_cross_entropy, and say what it kept, without waiting for the device.

    Args:
        input: [..., D], this and all that follow as for linear_sparse_cross_entropy.
        linear_weight: [V, D].
        target: [...] class ids.
        linear_bias: [V].
        k: classes that the sum keeps, in [1, V].
        top_p: softmax mass that the sum keeps, in (0, 1].
        ignore_index: class id of rows that don't count.
        reduction: "none", "mean" or "sum".
        label_smoothing: share of the target's mass that is spread, in [0, 1].
        weight: [V], 0 or more.
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1; None chooses.
        backend: "auto", "pytorch" or "triton".

    Returns:
        What linear_sparse_cross_entropy returns, and the LossStats of its rows.

    Raises:
        ValueError: as linear_sparse_cross_entropy.
    """
    call = LinearCall(
        "linear_sparse_cross_entropy_with_stats",
        input,
        linear_weight,
        target,
        linear_bias,
        ignore_index,
        reduction,
        label_smoothing,
        weight,
        softcap,
        chunk_size,
        backend,
    )
    result = truncated(call, k, top_p, stats=True)
    return reduced(result, reduction), loss_stats(result)


def linear_entmax_loss_with_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LossStats]:
    """Compute linear_entmax_loss, and say what its support is, without waiting for the device.

    Args:
        input: [..., D], this and all that follow as for linear_entmax_loss.
        linear_weight: [V, D].
        target: [...] class ids.
        alpha: 1 or more: a float, or a tensor that broadcasts to [...].
        linear_bias: [V].
        ignore_index: class id of rows that don't count.
        reduction: "none", "mean" or "sum".
        label_smoothing: share of the target's mass that is spread, in [0, 1].
        weight: [V], 0 or more.
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1; None chooses.
        backend: "auto", "pytorch" or "triton".

    Returns:
        What linear_entmax_loss returns, and the LossStats of its rows.

    Raises:
        ValueError: as linear_entmax_loss.
    """
    call = LinearCall(
        "linear_entmax_loss_with_stats",
        input,
        linear_weight,
        target,
        linear_bias,
        ignore_index,
        reduction,
        label_smoothing,
        weight,
        softcap,
        chunk_size,
        backend,
    )
    result = entmax(call, alpha, stats=True)
    return reduced(result, reduction), loss_stats(result)
