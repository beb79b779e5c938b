"""What every public loss does around its autograd Function: which rows count, and the mean."""

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.checks import (
    Reduction,
    check_class_weight,
    check_device,
    check_distributions,
    check_floating,
    check_ids,
)

DEFAULT_K = 64


def check_logits(name: str, logits: Tensor) -> None:
    """Refuse logits that aren't a floating-point tensor with at least one class."""
    check_floating(name, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{name}: logits have shape {tuple(logits.shape)}, but they must be [..., classes] "
            "with at least one class."
        )


def check_target(
    name: str,
    target: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    ignore_index: int,
    like: Tensor,
) -> None:
    """Check class ids or distributions for logits of this shape, and the class weights."""
    check_device(name, "target", target, like.device)
    check_class_weight(name, weight, shape[-1], like)
    if target.is_floating_point():
        check_distributions(name, target, shape)
    else:
        check_ids(name, target, shape[:-1], shape[-1], ignore_index)


def flat_target(target: Tensor, num_classes: int) -> Tensor:
    """Return class ids as int64 [N], or distributions as [N, V]."""
    if target.is_floating_point():
        return target.reshape(-1, num_classes)
    return target.reshape(-1).long()


def counted_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the flat places of the rows that count, or None where all of them do."""
    if target.is_floating_point():
        return None
    counted = target != ignore_index
    return None if bool(counted.all()) else counted.nonzero()[:, 0]


def flat_alpha(alpha: float | Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Return None for a float, [] for one alpha, and else one alpha for each row, [N]."""
    if not isinstance(alpha, Tensor):
        return None
    dtype = torch.promote_types(like.dtype, torch.float32)
    alpha = alpha.to(device=like.device, dtype=dtype)
    return alpha.reshape(()) if alpha.numel() == 1 else alpha.expand(shape).reshape(-1)


def reduce_losses(
    losses: Tensor,
    target: Tensor,
    rows: Tensor | None,
    weight: Tensor | None,
    reduction: Reduction,
    shape: tuple[int, ...],
) -> Tensor:
    """Reduce losses [N]; the mean is over the weight of the rows that count, and 0 without any."""
    if reduction == "none":
        return losses.view(shape)
    if reduction == "sum":
        return losses.sum()
    ids = target if rows is None else target[rows]
    if weight is None or target.is_floating_point():
        return losses.sum() / max(ids.shape[0], 1)
    total = weight.to(losses.dtype)[ids].sum()
    return losses.sum() / torch.where(total > 0, total, 1.0)
