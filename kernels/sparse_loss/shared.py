"""What every public loss does around its operator: checks, the mean, and the statistics."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import check_backend
from sparseformer.kernels.sparse_loss.autograd import LogitsForward
from sparseformer.kernels.sparse_loss.checks import (
    Reduction,
    check_class_weight,
    check_device,
    check_distributions,
    check_floating,
    check_ids,
)
from sparseformer.kernels.sparse_loss.linear_autograd import LinearForward
from sparseformer.kernels.sparse_loss.results import STATS_BEFORE_IDS

DEFAULT_K = 64


class LossStats(NamedTuple):
    """What a loss did to its rows, on their device; the shares are over the rows that count.

    Attributes:
        target_in_top_k: [], share of rows whose target is kept: among the k largest logits, in
            the nucleus, or in the support of entmax. For distributions, the target is their
            largest class, here and in accuracy.
        support_size: [], mean number of kept classes.
        accuracy: [], share of rows whose largest logit is the target's; of equal logits the
            lowest class counts.
        top_ids: [..., k] int64 classes that are kept, in ascending order; [..., 1], the class of
            the largest logit, for losses without k. -1 in rows that don't count, and for
            excluded classes.
    """

    target_in_top_k: Tensor
    support_size: Tensor
    accuracy: Tensor
    top_ids: Tensor


def check_logits(name: str, logits: Tensor) -> None:
    """Refuse logits that aren't a floating-point tensor with at least one class."""
    check_floating(name, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{name}: logits have shape {tuple(logits.shape)}, but they must be [..., classes] "
            "with at least one class."
        )


def check_loss_backend(name: str, backend: str) -> None:
    """Refuse a backend that the losses don't have."""
    check_backend(name, backend, ("pytorch", "triton"))


def check_target(
    name: str, target: Tensor, shape: tuple[int, ...], weight: Tensor | None, like: Tensor
) -> None:
    """Check class ids or distributions for logits of this shape, and the class weights."""
    check_device(name, "target", target, like.device)
    check_class_weight(name, weight, shape[-1], like)
    if target.is_floating_point():
        check_distributions(name, target, shape)
    else:
        check_ids(name, target, shape[:-1])


def alpha_like(alpha: float | Tensor, like: Tensor) -> Tensor | None:
    """Return None for a float, else alpha on the device and in the precision of the sums."""
    if not isinstance(alpha, Tensor):
        return None
    dtype = torch.promote_types(like.dtype, torch.float32)
    return alpha.to(device=like.device, dtype=dtype)


def reduce_losses(losses: Tensor, denominator: Tensor, reduction: Reduction) -> Tensor:
    """Reduce losses [...]; the mean is over the weight of the rows that count, 0 without any."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / denominator


def reduced(result: LogitsForward | LinearForward, reduction: Reduction) -> Tensor:
    """Reduce the losses of an operator."""
    return reduce_losses(result.losses, result.denominator, reduction)


def loss_stats(result: LogitsForward | LinearForward) -> LossStats:
    """Return the statistics of rows, averaged without waiting for the device."""
    stats = result.stats
    counted = (stats[:, :1] >= 0).sum().clamp_(min=1)
    sums = stats[:, :STATS_BEFORE_IDS].clamp(min=0).sum(0)
    size, kept, correct = (sums.to(result.losses.dtype) / counted).unbind()
    top_ids = stats[:, STATS_BEFORE_IDS:].reshape(*result.losses.shape, -1)
    return LossStats(kept, size, correct, top_ids)
