"""The PyTorch backend of attention: from the operator's arguments to blocks and back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen
from sparseformer.kernels.entmax_attention.arguments import Arguments, Gradients, Saved, Wanted
from sparseformer.kernels.entmax_attention.checks import checked_alpha, checked_segments
from sparseformer.kernels.entmax_attention.chunked import (
    Inputs,
    backward_blocks,
    forward_blocks,
    prepare_inputs,
    zero_dead_rows,
)
from sparseformer.kernels.entmax_attention.masks import AttentionParams, Padding
from sparseformer.kernels.entmax_attention.row_maps import (
    Entmax,
    KeptSoftmax,
    RowMap,
    softmax_rows,
)
from sparseformer.kernels.entmax_attention.stats import StatsCollector
from sparseformer.kernels.softmax_variants.reference import (
    topk_probabilities,
    topp_probabilities,
)


def attention_forward(
    arguments: Arguments, keep: bool, count: bool, backend: Chosen
) -> tuple[Tensor, Saved, Tensor]:
    """Return the output, what the backward pass needs if `keep`, and counts [4, Hq] if `count`."""
    query = arguments.query
    stats = StatsCollector(query, arguments.key) if count else None
    saved = empty_saved(arguments, keep)
    with _without_autocast(query):
        params, inputs = _prepare(arguments)
        output = empty_output(arguments, inputs.query.dtype).zero_()
        row_map = _row_map(arguments, inputs, backend)
        rows = saved.rows.zero_() if saved.rows.numel() else None
        forward_blocks(inputs, row_map, params, output, rows, stats)
    counts = query.new_empty((0, query.shape[1]), dtype=torch.float32)
    if stats is not None:
        counts = torch.stack(stats.result())
    return output.to(query.dtype), saved, counts


def attention_backward(
    arguments: Arguments, saved: Saved, grad_output: Tensor, wanted: Wanted, backend: Chosen
) -> Gradients:
    """Return the gradients that are wanted, each in the dtype and layout of its tensor."""
    originals = arguments.differentiable()
    with _without_autocast(grad_output):
        params, inputs = _prepare(arguments)
        dtype = inputs.query.dtype
        grad_output = grad_output.to(dtype)
        if inputs.padding is not None:
            grad_output = zero_dead_rows(grad_output, inputs.padding, params)
        grads = Gradients(
            *(
                torch.zeros_like(x, dtype=dtype) if want and x is not None else None
                for x, want in zip(originals, wanted, strict=True)
            )
        )
        row_map = _row_map(arguments, inputs, backend)
        backward_blocks(inputs, row_map, params, saved.rows, grad_output, grads)
    pairs = zip(grads, originals, strict=True)
    return Gradients(*(None if g is None or x is None else g.to(x.dtype) for g, x in pairs))


def empty_output(arguments: Arguments, dtype: torch.dtype) -> Tensor:
    """Return [B, Hq, Lq, Dv], laid out as [B, Lq, Hq, Dv] for the projection that follows."""
    batch, heads, num_queries, _ = arguments.query.shape
    shape = (batch, num_queries, heads, arguments.value.shape[3])
    return arguments.query.new_empty(shape, dtype=dtype).transpose(1, 2)


def empty_saved(arguments: Arguments, keep: bool) -> Saved:
    """Return unset memory for what the backward pass needs: maximum and threshold of each row."""
    query = arguments.query
    numbers = 2 if keep and _has_threshold(arguments) else 0
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.new_empty((*query.shape[:3], numbers), dtype=dtype)
    return Saved(rows, query.new_empty(0), query.new_empty(0, dtype=torch.int32))


def _has_threshold(arguments: Arguments) -> bool:
    is_softmax = arguments.alpha is None and arguments.parameter == 1.0
    return arguments.mapping == "entmax" and not is_softmax


def _row_map(arguments: Arguments, inputs: Inputs, backend: Chosen) -> RowMap:
    if _has_threshold(arguments):
        alpha = checked_alpha(arguments.alpha, arguments.parameter)
        if isinstance(alpha, Tensor):
            alpha = alpha.to(inputs.query.dtype).view(1, -1, 1, 1)
        return Entmax(alpha, backend)
    kept: dict[str, Callable[[Tensor], Tensor]] = {
        "entmax": softmax_rows,
        "topk": partial(topk_probabilities, k=int(arguments.parameter)),
        "topp": partial(topp_probabilities, p=arguments.parameter),
    }
    return KeptSoftmax(kept[arguments.mapping])


def _prepare(arguments: Arguments) -> tuple[AttentionParams, Inputs]:
    query, key, value, _, relative_bias = arguments[:5]
    params = AttentionParams(
        scale=arguments.scale,
        segments=checked_segments(arguments),
        left=arguments.left,
        right=arguments.right,
        dropout_p=arguments.dropout_p,
        seed=0 if arguments.seed is None else int(arguments.seed),
        chunk_elements=arguments.chunk_elements,
    )
    padding = _padding(arguments)
    return params, prepare_inputs(query, key, value, relative_bias, padding, params)


def _padding(arguments: Arguments) -> Padding | None:
    start, end = arguments.key_start, arguments.key_end
    if start is None and end is None:
        return None
    batch, num_keys = arguments.query.shape[0], arguments.key.shape[2]
    full = arguments.query.new_full((batch,), num_keys, dtype=torch.int64)
    return Padding(
        torch.zeros_like(full) if start is None else start.long(),
        full if end is None else end.long(),
    )


def _without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Keep autocast from rounding the products inside to 16 bits."""
    device_type = like.device.type
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
