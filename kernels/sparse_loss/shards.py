"""The output matrix cut into contiguous slices of classes, one for each process of a group."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparseformer.kernels.entmax.reference import probabilities

if TYPE_CHECKING:
    Group = dist.ProcessGroup | None
else:
    # Some builds of torch have no process groups.
    Group = Any

_MAX_STEPS = 60


class Shard(NamedTuple):
    """Where the classes of this process lie among those of the group, in the order of ranks."""

    first: int
    size: int
    largest: int  # classes of the process that has most
    num_classes: int
    group: Group

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the processes; `values` is overwritten."""
        dist.all_reduce(values, dist.ReduceOp.SUM, self.group)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum over the processes, +inf for NaN; `values` is overwritten."""
        # A reduction may drop a NaN, depending on the order of the processes.
        values.masked_fill_(values.isnan(), torch.inf)
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return values [n, m] of all processes side by side, [n, m times processes]."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), self.group)
        return torch.cat(parts, -1)


def find_shard(linear_weight: Tensor, group: Group) -> Shard:
    """Exchange the sizes of the slices; the device is read once."""
    own = torch.tensor([[linear_weight.shape[0]]], device=linear_weight.device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group)
    sizes: Sequence[int] = torch.cat(parts).flatten().tolist()
    rank = dist.get_rank(group)
    return Shard(sum(sizes[:rank]), sizes[rank], max(sizes), sum(sizes), group)


def solve_threshold(centred: Tensor, alpha: float | Tensor, shard: Shard) -> Tensor:
    """Return t [n, 1] with sum p = 1 over the classes of all processes, by Newton's steps from 0.

    Only Z = sum p and sum u cross processes, 2 n numbers in each of about 4 to 8 rounds, and every
    process takes the same steps.

    Args:
        centred: [n, m] scores of this process less the maximum over all processes.
        alpha: in [1, 2]; a float, or [n, 1] or [1, 1].
        shard: of this process.
    """
    t = torch.zeros_like(centred[:, :1])
    eps = (alpha if isinstance(alpha, Tensor) else t.new_tensor(alpha)) - 1.0
    tolerance = torch.finfo(t.dtype).eps ** 0.5
    for _ in range(_MAX_STEPS if t.numel() > 0 else 0):
        probs, slopes = probabilities(centred, t, alpha)
        sums = torch.cat([probs.sum(-1, keepdim=True), slopes.sum(-1, keepdim=True)], -1)
        total, slope = shard.sum(sums).split(1, -1)
        log_total = total.log()
        # (1 - Z^-eps) / eps, and log Z at eps = 0.
        ratio = torch.where(eps > 0, -torch.expm1(-eps * log_total) / eps, log_total)
        # A row without any class has Z = 0 and keeps t = 0.
        step = torch.where(total > 0, total * ratio / slope, 0.0)
        t += step
        # The error is of the order of the last step squared.
        if not bool((step.abs() > tolerance * (1.0 + t.abs())).any()):
            break
    return t
