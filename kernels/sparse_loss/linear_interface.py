"""Losses on hidden states and the output matrix, called like torch's F.linear_cross_entropy."""

from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.sparse_loss.checks import Reduction
from sparseformer.kernels.sparse_loss.linear_call import LinearCall, entmax, truncated
from sparseformer.kernels.sparse_loss.shared import reduced


def linear_sparse_cross_entropy(
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
) -> Tensor:
    """Compute sparse_cross_entropy of `z = cap tanh((h W^T + b) / cap)` without holding z.

    The logits come in tiles of tokens by classes, and the k largest of a token are merged tile by
    tile (top_p needs whole rows: tiles of tokens). What is kept for the gradient is k + 1 numbers
    and class ids of each token, and only those rows of `linear_weight` are read and written. Up
    to 2^24 logits are computed at once, which is quicker; so are spans that are nearly dense,
    from a second product.

    The gradient of linear_weight is summed in float32 (float64 for float64) over all tokens, and
    rounded once, to the dtype of linear_weight; so are those of linear_bias and of input.

    Args:
        input: [..., D] hidden states.
        linear_weight: [V, D] output matrix.
        target: [...] class ids in [0, V), or ignore_index.
        linear_bias: [V], -inf for a class that is excluded.
        k: as for sparse_cross_entropy; 64 when neither k nor top_p is given.
        top_p: as for sparse_cross_entropy.
        ignore_index: rows with this class id are never computed.
        reduction: as for sparse_cross_entropy.
        label_smoothing: as for sparse_cross_entropy.
        weight: [V], 0 or more, a factor for each class as in F.cross_entropy.
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1; None chooses.
        backend: as for sparse_cross_entropy.

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 input.

    Raises:
        ValueError: as sparse_cross_entropy; also for shapes or dtypes that don't fit together.

    Source: the chunked output layer of Wijmans et al., "Cut Your Losses in Large-Vocabulary
    Language Models" (2024, arXiv 2411.09009), here with a truncated sum.
    """
    call = LinearCall(
        "linear_sparse_cross_entropy",
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
    return reduced(truncated(call, k, top_p), reduction)


def linear_entmax_loss(
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
) -> Tensor:
    """Compute entmax_loss of `z = cap tanh((h W^T + b) / cap)` without holding z.

    The support lies in `z_j > max(z) - 1 / (alpha - 1)`, so a running maximum filters it exactly
    while tiles of logits go by; the gradient reads and writes only the support's classes. Rows
    with a wide support (alpha near 1, random weights), and label smoothing, whose gradient is
    dense, are computed again in the backward pass, a few tokens at a time.

    Args:
        input: [..., D] hidden states.
        linear_weight: [V, D] output matrix.
        target: [...] class ids in [0, V), or ignore_index.
        alpha: as for entmax_loss: a float, or a tensor that broadcasts to [...]; differentiable.
        linear_bias: [V], -inf for a class that is excluded.
        ignore_index: rows with this class id are never computed.
        reduction: as for sparse_cross_entropy.
        label_smoothing: as for entmax_loss.
        weight: [V], 0 or more, a factor for each class as in F.cross_entropy.
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1; None chooses.
        backend: as for sparse_cross_entropy.

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 input.

    Raises:
        ValueError: as linear_sparse_cross_entropy.

    Source: Peters, Niculae and Martins (2019, arXiv 1905.05702) for the loss.
    """
    call = LinearCall(
        "linear_entmax_loss",
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
    return reduced(entmax(call, alpha), reduction)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute F.cross_entropy of `z = cap tanh((h W^T + b) / cap)`, a few tokens at a time.

    Up to 2^24 logits are computed at once and the probabilities kept; more come in tiles of
    tokens, which the backward pass computes again.

    Args:
        input: [..., D] hidden states.
        linear_weight: [V, D] output matrix.
        target: [...] class ids in [0, V), or ignore_index.
        linear_bias: [V], -inf for a class that is excluded.
        ignore_index: rows with this class id are never computed.
        reduction: as for sparse_cross_entropy.
        label_smoothing: share of the target's mass that is spread over all classes, in [0, 1].
        weight: [V], 0 or more, a factor for each class as in F.cross_entropy.
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1; None chooses.
        backend: as for sparse_cross_entropy.

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 input.

    Raises:
        ValueError: as linear_sparse_cross_entropy.
    """
    call = LinearCall(
        "linear_cross_entropy",
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
    return reduced(entmax(call, 1.0), reduction)
