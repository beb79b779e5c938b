"""The losses on hidden states where each process holds a slice of the output matrix."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import probabilities
from sparseformer.kernels.sparse_loss.autograd import (
    accumulation_dtype,
    alpha_gradient,
    flat_alpha,
    put,
    refuse_second_derivative,
    take,
)
from sparseformer.kernels.sparse_loss.counted import count_rows
from sparseformer.kernels.sparse_loss.entropy import entropy_slope
from sparseformer.kernels.sparse_loss.linear import Head, LinearRows, Tiling, read_targets, spans
from sparseformer.kernels.sparse_loss.linear_sums import Kept, Sums
from sparseformer.kernels.sparse_loss.mappings import centre
from sparseformer.kernels.sparse_loss.products import Entries, concatenate, sparse_entries
from sparseformer.kernels.sparse_loss.reference import truncated_kept
from sparseformer.kernels.sparse_loss.results import RowLoss
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.selection import top_k
from sparseformer.kernels.sparse_loss.shards import Shard, solve_threshold
from sparseformer.kernels.sparse_loss.targets import Targets


@dataclass(frozen=True)
class ShardRows(LinearRows):
    """The rows that count, and the slice of classes of this process; target ids are the slice's."""

    shard: Shard
    top: Tensor  # [n] largest score over all processes
    threshold: Tensor  # [n], t of the scores less top

    @property
    def chunk(self) -> int:
        """Tokens evaluated together: the same in every process, since each takes part."""
        return self.rule.chunk_size or max(self.tiling.logits // self.shard.largest, 1)

    def evaluate(self, start: int, stop: int) -> RowLoss:
        """Return this process's coefficients of a span of entmax rows that are solved."""
        scores = self.head.scores(self.hidden[start:stop], 0, self.shard.size)
        return RowLoss(self.top[start:stop], self.coefficients(scores, start), None, scores)

    def coefficients(self, scores: Tensor, start: int) -> Tensor:
        """Return p less the target in the classes of this process, for rows from start."""
        stop = start + scores.shape[0]
        top, t = self.top[start:stop], self.threshold[start:stop, None]
        probs = probabilities(scores - centre(top), t, self.alpha_of(start, stop))[0]
        assert self.targets.ids is not None
        ids = self.targets.ids[start:stop]
        # A row of -inf alone has no target, either.
        own = (ids >= 0) & (ids < self.shard.size) & (top > -torch.inf)
        places = ids.clamp(0, self.shard.size - 1)[:, None]
        return probs.scatter_add_(-1, places, -own[:, None].to(probs.dtype))


class _Result(NamedTuple):
    losses: Tensor  # [n]
    slope: Tensor | None  # [n]
    kept: Kept


def _top_k(call: ShardRows, targets: Targets) -> _Result:
    """Merge the k largest of all processes; every process gets the same rows."""
    k, shard, num_rows = call.rule.k, call.shard, call.hidden.shape[0]
    assert k is not None
    found = [call.kept_top_k(*span, k) for span in spans(0, num_rows, call.tiling.tokens)]
    kept, columns, target_scores = (torch.cat(part) for part in zip(*found, strict=True))
    columns = torch.where(columns < 0, 0, columns + shard.first)
    # Side by side in the order of ranks they are in the order of classes, so ties stay right.
    kept, order = top_k(shard.gather(kept), k)
    columns = shard.gather(columns).gather(-1, order)
    target_scores = shard.maximum(target_scores)
    result = truncated_kept(kept, columns, kept.amax(-1), targets, target_scores, call.request)
    coefficients = call.head.through_cap(result.coefficients, result.scores)
    assert result.columns is not None
    own = result.columns - shard.first
    inside = (own >= 0) & (own < shard.size)
    if call.request.backend == "triton":
        own, values = own.masked_fill(~inside, -1).int(), coefficients * inside
        entries = Entries(own.new_empty(0), own.flatten(), values.flatten())
    else:
        rows, places = (inside & (coefficients != 0)).nonzero(as_tuple=True)
        entries = Entries(rows.int(), own[rows, places].int(), coefficients[rows, places])
    return _Result(result.loss, None, _kept(entries, call, []))


def _entmax(call: ShardRows) -> _Result:
    """Solve the rows chunk by chunk; `call.top` and `call.threshold` are filled in place."""
    num_rows, shard = call.hidden.shape[0], call.shard
    log_partition = call.top.new_zeros(num_rows)
    slope = torch.zeros_like(log_partition) if call.request.slope else None
    target_scores = torch.full_like(log_partition, -torch.inf)
    parts: list[Entries] = []
    again: list[int] = []
    for start, stop in spans(0, num_rows, call.chunk):
        rows, alpha = slice(start, stop), call.alpha_of(start, stop)
        scores = call.head.scores(call.hidden[rows], 0, shard.size)
        read_targets(target_scores[rows], scores, 0, call.targets.slice(start, stop))
        top = shard.maximum(scores.amax(-1))
        centred = scores - centre(top)
        t = solve_threshold(centred, alpha, shard)
        call.top[rows], call.threshold[rows] = top, t[:, 0]
        log_partition[rows], entropy_rise = _partition(centred, t, alpha, call)
        if slope is not None and entropy_rise is not None:
            slope[rows] = entropy_rise
        del centred
        if call.request.gradient:
            coefficients = call.head.through_cap(call.coefficients(scores, start), scores)
            entries = sparse_entries(coefficients, None, shard.size, start)
            if entries is None:
                again.extend((start, stop))
            else:
                parts.append(entries)
    mass = (call.top > -torch.inf).to(call.top.dtype)
    lead = shard.maximum(target_scores) - centre(call.top)[:, 0]
    losses = mass * log_partition - (mass * lead).nan_to_num_(nan=0.0, neginf=-torch.inf)
    losses = losses.masked_fill(~(call.top < torch.inf), torch.nan)
    return _Result(losses, slope, _kept(concatenate(parts, losses), call, again))


def _partition(
    centred: Tensor, t: Tensor, alpha: float | Tensor, call: ShardRows
) -> tuple[Tensor, Tensor | None]:
    """Return the log-partition A of each row over all processes, and its slope in alpha."""
    probs = probabilities(centred, t, alpha)[0]
    # An excluded class is 0 * -inf.
    expected = (probs * centred.masked_fill(centred == -torch.inf, 0.0)).sum(-1)
    curvature = torch.zeros_like(expected)
    if call.request.slope:
        curvature = entropy_slope(probs, curvature, alpha)
    total, expected, curvature = call.shard.sum(torch.stack([probs.sum(-1), expected, curvature]))
    row_alpha = alpha.squeeze(-1) if isinstance(alpha, Tensor) else alpha
    t = t[:, 0]
    partition = t + (total - 1.0 + (row_alpha - 1.0) * (expected - t * total)) / row_alpha
    partition = torch.where(total > 0, partition, 0.0)
    if not call.request.slope:
        return partition, None
    return partition, curvature - (partition - expected) / row_alpha


def _kept(entries: Entries, call: ShardRows, again: list[int]) -> Kept:
    nothing = call.top.new_empty(0, call.shard.size)
    return Kept(*entries, nothing, torch.tensor(again, dtype=torch.int64))


class ParallelLoss(torch.autograd.Function):
    """Losses [...] and the mean's denominator, the same in every process.

    The gradient of the hidden states is summed over the processes; that of the matrix and the
    bias is this process's slice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        alpha: Tensor | None,
        target: Tensor,
        rule: Rule,
        shard: Shard,
    ) -> tuple[Tensor, Tensor]:
        rule = rule.on(hidden)
        dtype = accumulation_dtype(hidden.dtype)
        checked, rows, denominator = count_rows(rule, target, shard.num_classes, None, alpha, dtype)
        call = _rows(ctx, (hidden, linear_weight, linear_bias, alpha), checked, rows, rule, shard)
        with torch.autocast(hidden.device.type, enabled=False):
            if call.hidden.shape[0] == 0:
                result = _Result(call.top, call.top, _kept(concatenate([], call.top), call, []))
            elif rule.k is None:
                result = _entmax(call)
            else:
                result = _top_k(call, rule.targets(checked, None, rows, call.top))
        saved = (hidden, linear_weight, linear_bias, alpha, checked, rows, result.slope)
        ctx.save_for_backward(*saved, call.top, call.threshold, *result.kept)
        ctx.rule, ctx.shard = rule, shard
        ctx.mark_non_differentiable(denominator)
        return put(result.losses, rows, checked.shape[0]).view(rule.shape), denominator

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.rule.name)
        saved = ctx.saved_tensors
        operands, (target, rows, slope, top, threshold), kept = saved[:4], saved[4:9], saved[9:]
        call = _rows(ctx, operands, target, rows, ctx.rule, ctx.shard, (top, threshold))
        chosen, needed = take(grad.reshape(-1), rows), list(ctx.needs_input_grad[:3])
        with torch.autocast(grad.device.type, enabled=False):
            sums = Sums(call, chosen, Kept(*kept), needed)
        found, dtype = [sums.hidden, sums.weight, sums.bias], operands[0].dtype
        if sums.hidden is not None:
            whole = ctx.shard.sum(sums.hidden) if chosen.numel() > 0 else sums.hidden
            found[0] = put(whole.to(dtype), rows, target.shape[0]).view(operands[0].shape)
        gradients = [None if value is None else value.to(dtype) for value in found]
        if ctx.needs_input_grad[3]:
            every = put(slope, rows, target.shape[0])
            gradients.append(alpha_gradient(grad, every, operands[3].shape))
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))


def _rows(
    ctx: Any,
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    target: Tensor,
    rows: Tensor | None,
    rule: Rule,
    shard: Shard,
    solved: tuple[Tensor, Tensor] | None = None,
) -> ShardRows:
    """Return the rows that count, in the form that both passes use."""
    hidden, linear_weight, linear_bias, alpha = operands
    flat = take(hidden.reshape(-1, hidden.shape[-1]), rows)
    dtype = accumulation_dtype(hidden.dtype)
    if solved is None:
        empty = flat.new_zeros(flat.shape[0], dtype=dtype)
        solved = empty, empty.clone()
    alpha = flat_alpha(alpha, rule.shape)
    return ShardRows(
        hidden=flat,
        head=Head(linear_weight, linear_bias, rule.softcap, dtype),
        targets=rule.targets(target - shard.first, None, rows, solved[0]),
        alpha=alpha if alpha is None or alpha.ndim == 0 else take(alpha, rows),
        rows=rows,
        rule=rule,
        tiling=Tiling.choose(flat.shape[0], shard.size, rule.chunk_size, hidden.is_cuda),
        request=rule.request(any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3], False),
        shard=shard,
        top=solved[0],
        threshold=solved[1],
    )
