"""Every mask of a call as one interval of keys per query, computed on the device."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseformer.kernels.entmax_attention.arguments import Arguments


class RowBounds(NamedTuple):
    """Which keys each query may see; B' is B with padding, else 1.

    Attributes:
        rows: int32 [B', 3, Lq]: the first key, one past the last key, and the number that gives
            the entry of relative_bias when the key's position is added. A query without keys has
            first >= end.
        spans: int32 [B', 4]: the keys [start, end) of the batch row that some query sees lie
            between its padding; the queries [start, end) outside of which no query sees a key.
    """

    rows: Tensor
    spans: Tensor

    def batch_stride(self) -> int:
        """Return 1 if every batch row has bounds of its own, 0 if all share theirs."""
        return int(self.rows.shape[0] > 1)


def row_bounds(arguments: Arguments) -> RowBounds:
    """Return the keys each query sees: those of its segment, its band and its batch row."""
    num_queries = arguments.query.shape[2]
    index = torch.arange(num_queries, device=arguments.query.device)
    start, end = _slots(arguments, index)
    k_start, k_end, diagonal, shift = _segments(arguments, index)
    centre = index + diagonal
    first = torch.maximum((centre - arguments.left).clamp_min(k_start), start)
    last = torch.minimum((centre + arguments.right + 1).clamp_max(k_end), end)
    base = (num_queries - 1 - index + shift).expand_as(first)
    rows = torch.stack((first, last, base), dim=1)
    sees = first < last
    live_start = torch.where(sees, index, num_queries).amin(1, keepdim=True)
    live_end = torch.where(sees, index + 1, 0).amax(1, keepdim=True)
    spans = torch.cat((start, end, live_start, live_end), dim=1)
    return RowBounds(rows.to(torch.int32), spans.to(torch.int32))


def common_keys(bounds: RowBounds, block: int) -> Tensor:
    """Return the keys [start, end) that every query of a block sees, int32 [B', blocks, 2]."""
    first, end = bounds.rows[:, 0], bounds.rows[:, 1]
    missing = (-first.shape[1]) % block
    first = pad(first, (0, missing), value=0).unflatten(1, (-1, block)).amax(2)
    end = pad(end, (0, missing), value=torch.iinfo(end.dtype).max).unflatten(1, (-1, block)).amin(2)
    return torch.stack((first, end), dim=2)


def _slots(arguments: Arguments, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys that aren't padding, both int64 [B', 1]."""
    num_keys = arguments.key.shape[2]
    start, end = arguments.key_start, arguments.key_end
    batch = 1 if start is None and end is None else arguments.query.shape[0]
    zeros, full = index.new_zeros(batch), index.new_full((batch,), num_keys)
    start = zeros if start is None else start.long().clamp_min(0)
    end = full if end is None else end.long().clamp_max(num_keys)
    return start[:, None], end[:, None]


def _segments(
    arguments: Arguments, index: Tensor
) -> tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]:
    """Return the keys [start, end) of each query's segment, its diagonal, its shift of offsets."""
    bounds_q, bounds_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    num_queries, num_keys = arguments.query.shape[2], arguments.key.shape[2]
    if bounds_q is None or bounds_k is None:
        return 0, num_keys, num_keys - num_queries, 0
    bounds_q, bounds_k = bounds_q.long(), bounds_k.long()
    # right=True passes over empty segments, which share their bound with the next one.
    segment = torch.searchsorted(bounds_q[1:].contiguous(), index, right=True)
    k_start, k_end = bounds_k[segment], bounds_k[segment + 1]
    return k_start, k_end, k_end - bounds_q[segment + 1], bounds_q[segment] - k_start
