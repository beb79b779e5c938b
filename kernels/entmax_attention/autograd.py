"""What attention saves for the backward pass, and which gradients it returns."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparseformer.kernels.entmax_attention.chunked import (
    Wanted,
    backward_blocks,
    forward_blocks,
    prepare_inputs,
    zero_dead_rows,
)
from sparseformer.kernels.entmax_attention.masks import AttentionParams, Padding
from sparseformer.kernels.entmax_attention.row_maps import Entmax, RowMap
from sparseformer.kernels.entmax_attention.stats import StatsCollector


class AttentionTensors(NamedTuple):
    """The tensors of a call; alpha [Hq] is given only where it takes part as a tensor."""

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None
    relative_bias: Tensor | None
    padding: Padding | None

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that may ask for a gradient, in the order of Gradients."""
        return self[:5]


def attend(
    tensors: AttentionTensors,
    row_map: RowMap,
    params: AttentionParams,
    stats: StatsCollector | None = None,
) -> Tensor:
    """Run attention, saving something only if a gradient is needed."""
    inputs = tensors.differentiable()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        padding = tensors.padding or (None, None)
        output: Tensor = _Attention.apply(*inputs, *padding, row_map, params, stats)
        return output
    with _without_autocast(tensors.query):
        return _forward(tensors, row_map, params, stats)[0]


def _forward(
    tensors: AttentionTensors,
    row_map: RowMap,
    params: AttentionParams,
    stats: StatsCollector | None,
) -> tuple[Tensor, list[Tensor]]:
    query, key, value, alpha, relative_bias, padding = tensors
    inputs = prepare_inputs(query, key, value, relative_bias, padding, params)
    row_map = _with_alpha(row_map, alpha, inputs.query)
    output, kept = forward_blocks(inputs, row_map, params, stats)
    return output.to(query.dtype), kept


def _with_alpha(row_map: RowMap, alpha: Tensor | None, like: Tensor) -> RowMap:
    return row_map if alpha is None else Entmax(alpha.to(like.dtype).view(1, -1, 1, 1))


def _without_autocast(query: Tensor) -> AbstractContextManager[Any]:
    """Keep autocast from rounding the products inside to 16 bits."""
    device_type = query.device.type
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class _Attention(torch.autograd.Function):
    """Saves q, k, v and one threshold per row, and computes the scores again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor | None,
        relative_bias: Tensor | None,
        key_start: Tensor | None,
        key_end: Tensor | None,
        row_map: RowMap,
        params: AttentionParams,
        stats: StatsCollector | None,
    ) -> Tensor:
        padding = None if key_start is None or key_end is None else Padding(key_start, key_end)
        tensors = AttentionTensors(query, key, value, alpha, relative_bias, padding)
        with _without_autocast(query):
            output, kept = _forward(tensors, row_map, params, stats)
        saved = (query, key, value, alpha, relative_bias, key_start, key_end)
        ctx.save_for_backward(*saved, *kept)
        ctx.row_map, ctx.params = row_map, params
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, alpha, relative_bias, key_start, key_end, *kept = ctx.saved_tensors
        padding = None if key_start is None else Padding(key_start, key_end)
        with _without_autocast(query):
            params = ctx.params
            inputs = prepare_inputs(query, key, value, relative_bias, padding, params)
            grad_output = grad_output.to(inputs.query.dtype)
            if padding is not None:
                grad_output = zero_dead_rows(grad_output, padding, params)
            row_map = _with_alpha(ctx.row_map, alpha, inputs.query)
            wanted = Wanted(*ctx.needs_input_grad[:5])
            grads = backward_blocks(inputs, row_map, params, iter(kept), grad_output, wanted)
        originals = (query, key, value, alpha, relative_bias)
        cast = [None if g is None else g.to(x.dtype) for g, x in zip(grads, originals, strict=True)]
        return (*cast, None, None, None, None, None)
