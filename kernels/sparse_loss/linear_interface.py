"""Losses on hidden states and the output matrix, called like torch's F.linear_cross_entropy."""

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.checks import (
    Reduction,
    check_alpha,
    check_head,
    check_options,
    check_tiles,
    check_truncation,
)
from sparseformer.kernels.sparse_loss.linear_autograd import LinearLoss
from sparseformer.kernels.sparse_loss.reference import Truncation
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.shared import (
    DEFAULT_K,
    check_target,
    counted_rows,
    flat_alpha,
    flat_target,
    reduce_losses,
)


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
) -> Tensor:
    """Compute sparse_cross_entropy of `z = cap tanh((h W^T + b) / cap)` without holding z.

    The logits come in tiles of tokens by classes, and the k largest of a token are merged tile by
    tile (top_p needs whole rows: tiles of tokens). What is kept for the gradient is k + 1 numbers
    and class ids of each token, and only those rows of `linear_weight` are read and written. Up
    to 2^24 logits are computed at once, which is quicker; so are spans that are nearly dense,
    from a second product.

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

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 input.

    Raises:
        ValueError: as sparse_cross_entropy; also for shapes or dtypes that don't fit together.

    Source: the chunked output layer of Wijmans et al., "Cut Your Losses in Large-Vocabulary
    Language Models" (2024, arXiv 2411.09009), here with a truncated sum.
    """
    name = "linear_sparse_cross_entropy"
    input, linear_weight, linear_bias = _head(name, input, linear_weight, linear_bias)
    k = DEFAULT_K if k is None and top_p is None else k
    check_truncation(name, k, top_p, linear_weight.shape[0])
    options = (label_smoothing, softcap, chunk_size)
    rule = Rule(name, tuple(input.shape[:-1]), Truncation(k, top_p), None, *options)
    head = (input, linear_weight, linear_bias)
    return _loss(rule, *head, None, target, weight, ignore_index, reduction)


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

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 input.

    Raises:
        ValueError: as linear_sparse_cross_entropy.

    Source: Peters, Niculae and Martins (2019, arXiv 1905.05702) for the loss.
    """
    name, lead = "linear_entmax_loss", tuple(input.shape[:-1])
    input, linear_weight, linear_bias = _head(name, input, linear_weight, linear_bias)
    check_alpha(name, alpha, lead)
    fixed = None if isinstance(alpha, Tensor) else float(alpha)
    options = (label_smoothing, softcap, chunk_size)
    rule = Rule(name, lead, None, fixed, *options)
    head = (input, linear_weight, linear_bias, flat_alpha(alpha, lead, input))
    return _loss(rule, *head, target, weight, ignore_index, reduction)


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

    Returns:
        [...] losses for "none", else one number; float32, or float64 for float64 input.

    Raises:
        ValueError: as linear_sparse_cross_entropy.
    """
    name = "linear_cross_entropy"
    input, linear_weight, linear_bias = _head(name, input, linear_weight, linear_bias)
    options = (label_smoothing, softcap, chunk_size)
    rule = Rule(name, tuple(input.shape[:-1]), None, 1.0, *options)
    head = (input, linear_weight, linear_bias)
    return _loss(rule, *head, None, target, weight, ignore_index, reduction)


def _loss(
    rule: Rule,
    hidden: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    alpha: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
) -> Tensor:
    check_options(rule.name, reduction, rule.label_smoothing)
    check_tiles(rule.name, rule.softcap, rule.chunk_size)
    if target.is_floating_point():
        raise ValueError(
            f"{rule.name}: target has dtype {target.dtype}, but it must hold class ids; "
            "use the loss on logits for distributions."
        )
    shape = (*rule.shape, linear_weight.shape[0])
    check_target(rule.name, target, shape, weight, ignore_index, hidden)
    target = flat_target(target, linear_weight.shape[0])
    rows = counted_rows(target, ignore_index)
    flat = hidden.reshape(-1, hidden.shape[-1])
    tensors = (flat, linear_weight, linear_bias, alpha, target, weight, rows)
    losses = LinearLoss.apply(*tensors, rule)
    return reduce_losses(losses, target, rows, weight, reduction, rule.shape)


def _head(
    name: str, hidden: Tensor, linear_weight: Tensor, linear_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the checked operands of the projection, in autocast's dtype where it is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        hidden, linear_weight = hidden.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    check_head(name, hidden, linear_weight, linear_bias)
    return hidden, linear_weight, linear_bias
