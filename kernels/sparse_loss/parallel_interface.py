"""Losses on hidden states and a slice of the output matrix in each process of torch.distributed."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.sparse_loss.checks import (
    Reduction,
    check_alpha,
    check_device,
    check_head,
    check_ids,
    check_options,
    check_tiles,
    check_truncation,
)
from sparseformer.kernels.sparse_loss.linear_call import autocast_head
from sparseformer.kernels.sparse_loss.parallel import ParallelLoss
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.shards import Group, find_shard
from sparseformer.kernels.sparse_loss.shared import (
    DEFAULT_K,
    alpha_like,
    check_loss_backend,
    reduce_losses,
)


def parallel_linear_sparse_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    linear_bias: Tensor | None = None,
    k: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute linear_sparse_cross_entropy with the output matrix cut by classes.

    Each process of the group holds a contiguous slice of the classes, in the order of ranks; the
    slices may differ in size. The k largest logits of each slice are gathered, k numbers and
    class ids of each token, and merged, so every process has the loss of the whole matrix, ties
    included. The gradient of `input` is summed over the processes in the backward pass; those of
    `linear_weight` and `linear_bias` are the slice's own.

    Args:
        input: [..., D] hidden states, the same in every process.
        linear_weight: [classes of this process, D], at least one class.
        target: [...] class ids of the whole vocabulary, or ignore_index; the same everywhere.
        group: process group; None for the default one.
        linear_bias: [classes of this process].
        k: classes that the sum keeps; 64 by default. It may exceed the slice, not the vocabulary.
        ignore_index: as for linear_sparse_cross_entropy, like all that follow.
        reduction: "none", "mean" or "sum".
        label_smoothing: share of the target's mass that is spread, in [0, 1].
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1; None chooses.
        backend: "auto", "pytorch" or "triton".

    Returns:
        [...] losses for "none", else one number; the same in every process. A logit that is NaN
        or +inf makes the loss NaN everywhere; an error in one process would leave the others
        waiting.

    Raises:
        ValueError: as linear_sparse_cross_entropy, for what every process can see.
    """
    name = "parallel_linear_sparse_cross_entropy"
    options = (ignore_index, reduction, label_smoothing, softcap, chunk_size, backend)
    call = _Call(name, input, linear_weight, target, linear_bias, group, *options)
    return _evaluate(call, DEFAULT_K if k is None else k, 1.0)


def parallel_linear_entmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    group: Group = None,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute linear_entmax_loss with the output matrix cut by classes.

    The processes agree on the threshold of each row by Newton's method on sums of their parts: a
    few numbers of each token cross them in each of about 4 to 8 rounds, however wide the support.
    Gradients as for parallel_linear_sparse_cross_entropy; that of alpha is the same everywhere.

    Args:
        input: [..., D] hidden states, the same in every process.
        linear_weight: [classes of this process, D], at least one class.
        target: [...] class ids of the whole vocabulary, or ignore_index; the same everywhere.
        alpha: in [1, 2]: a float, or a tensor that broadcasts to [...]; differentiable.
        group: process group; None for the default one.
        linear_bias: [classes of this process].
        ignore_index: as for linear_entmax_loss, like all that follow.
        reduction: "none", "mean" or "sum".
        softcap: bound of the logits' absolute value, above 0; None for none.
        chunk_size: tokens computed together, at least 1, the same everywhere; None chooses.
        backend: "auto", "pytorch" or "triton"; the products of the gradient only.

    Returns:
        As parallel_linear_sparse_cross_entropy.

    Raises:
        ValueError: as linear_entmax_loss, for what every process can see; also for alpha above 2.
    """
    name = "parallel_linear_entmax_loss"
    options = (ignore_index, reduction, 0.0, softcap, chunk_size, backend)
    call = _Call(name, input, linear_weight, target, linear_bias, group, *options)
    return _evaluate(call, None, alpha)


class _Call(NamedTuple):
    name: str
    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    group: Group
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    softcap: float | None
    chunk_size: int | None
    backend: Backend


def _evaluate(call: _Call, k: int | None, alpha: float | Tensor) -> Tensor:
    name, target, lead = call.name, call.target, tuple(call.input.shape[:-1])
    check_loss_backend(name, call.backend)
    head = autocast_head(call.input, call.linear_weight, call.linear_bias)
    check_head(name, *head)
    hidden = head[0]
    check_options(name, call.reduction, call.label_smoothing)
    check_tiles(name, call.softcap, call.chunk_size)
    check_device(name, "target", target, hidden.device)
    if target.is_floating_point():
        raise ValueError(f"{name}: target has dtype {target.dtype}, but it must hold class ids.")
    check_ids(name, target, lead)
    check_alpha(name, alpha, lead)
    _check_alpha_up_to_two(name, alpha)
    shard = find_shard(call.linear_weight, call.group)
    check_truncation(name, k, None, shard.num_classes)
    rule = Rule(
        name=name,
        k=k,
        alpha=None if isinstance(alpha, Tensor) else float(alpha),
        label_smoothing=call.label_smoothing,
        ignore_index=call.ignore_index,
        backend=call.backend,
        softcap=call.softcap,
        chunk_size=call.chunk_size,
        refuses_logits=False,
    )
    operands = (*head, alpha_like(alpha, hidden), target)
    losses, denominator = ParallelLoss.apply(*operands, rule, shard)
    return reduce_losses(losses, denominator, call.reduction)


def _check_alpha_up_to_two(name: str, alpha: float | Tensor) -> None:
    """Refuse alphas for which Newton's steps are no lower bounds."""
    largest = alpha.detach().amax() if isinstance(alpha, Tensor) else torch.tensor(alpha)
    if bool(largest > 2.0):
        raise ValueError(f"{name}: alpha is {float(largest)}, but it must be in [1, 2] here.")
