"""What callers may pass to attention, checked once, and what the computation makes of it."""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from sparseformer.kernels.entmax_attention.autograd import AttentionTensors, attend
from sparseformer.kernels.entmax_attention.masks import (
    UNLIMITED,
    AttentionParams,
    Padding,
    Segment,
)
from sparseformer.kernels.entmax_attention.row_maps import (
    Entmax,
    KeptSoftmax,
    RowMap,
    softmax_rows,
)
from sparseformer.kernels.entmax_attention.stats import AttentionStats, StatsCollector
from sparseformer.kernels.softmax_variants.reference import (
    topk_probabilities,
    topp_probabilities,
)

BACKENDS = ("auto", "pytorch")


@dataclass(frozen=True)
class Options:
    """The keyword arguments that every attention function shares."""

    is_causal: bool = False
    key_start: Tensor | None = None
    key_length: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    relative_bias: Tensor | None = None
    window: int | tuple[int, int] | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    backend: str = "auto"


@dataclass(frozen=True)
class Call:
    """A call whose arguments are known to fit together."""

    tensors: AttentionTensors
    row_map: RowMap
    params: AttentionParams

    def run(self) -> Tensor:
        """Return the output."""
        return attend(self.tensors, self.row_map, self.params)

    def run_with_stats(self) -> tuple[Tensor, AttentionStats]:
        """Return the output and its sparsity."""
        stats = StatsCollector(self.tensors.query, self.tensors.key)
        output = attend(self.tensors, self.row_map, self.params, stats)
        return output, stats.result()


def entmax_call(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: Options
) -> Call:
    """Check the arguments of entmax attention."""
    call = _checked_call(query, key, value, KeptSoftmax(softmax_rows), options)
    alpha = _checked_alpha(alpha, query)
    if isinstance(alpha, Tensor):
        return replace(call, tensors=call.tensors._replace(alpha=alpha))
    return call if alpha == 1.0 else replace(call, row_map=Entmax(alpha))


def topk_call(query: Tensor, key: Tensor, value: Tensor, k: int, options: Options) -> Call:
    """Check the arguments of top-k attention."""
    if k < 1:
        raise ValueError(f"k is {k}, but a query must keep 1 key or more.")
    return _checked_call(query, key, value, KeptSoftmax(partial(topk_probabilities, k=k)), options)


def topp_call(query: Tensor, key: Tensor, value: Tensor, p: float, options: Options) -> Call:
    """Check the arguments of top-p attention."""
    if not 0.0 < p <= 1.0:
        raise ValueError(f"p is {p}, but it must be in (0, 1].")
    return _checked_call(query, key, value, KeptSoftmax(partial(topp_probabilities, p=p)), options)


def _checked_call(
    query: Tensor, key: Tensor, value: Tensor, row_map: RowMap, options: Options
) -> Call:
    """Check the arguments that do not depend on the row map."""
    if options.backend not in BACKENDS:
        raise ValueError(f"backend is {options.backend!r}, but it must be one of {BACKENDS}.")
    _check_tensors(query, key, value)
    _check_bias(options.relative_bias, query, key)
    if not 0.0 <= options.dropout_p < 1.0:
        raise ValueError(f"dropout_p is {options.dropout_p}, but it must be in [0, 1).")
    padding = _checked_padding(options, query, key)
    tensors = AttentionTensors(query, key, value, None, options.relative_bias, padding)
    return Call(tensors, row_map, _params(query, key, options))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    named = {"query": query, "key": key, "value": value}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items())
    if any(x.dim() != 4 for x in named.values()):
        raise ValueError(f"query, key and value must be [B, H, L, D], got {shapes}.")
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    if not same_batch or key.shape[1:3] != value.shape[1:3] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query [B, Hq, Lq, D], key [B, Hkv, Lk, D] and value [B, Hkv, Lk, Dv] "
            f"must agree in B, Hkv, Lk and D, got {shapes}."
        )
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"The {query.shape[1]} query heads must be a multiple of the {key.shape[1]} key heads."
        )
    _check_types(query, key, value)


def _check_types(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtypes = [x.dtype for x in (query, key, value)]
    mixed = len(set(dtypes)) > 1 and not torch.is_autocast_enabled(query.device.type)
    if mixed or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            f"query, key and value must have one floating-point dtype (outside autocast), "
            f"got {dtypes}; convert them with .to(dtype)."
        )
    if not query.device == key.device == value.device:
        devices = [str(x.device) for x in (query, key, value)]
        raise ValueError(f"query, key and value must be on one device, got {devices}.")


def _check_bias(relative_bias: Tensor | None, query: Tensor, key: Tensor) -> None:
    if relative_bias is None:
        return
    heads, num_queries, num_keys = query.shape[1], query.shape[2], key.shape[2]
    expected = (heads, max(num_queries + num_keys - 1, 0))
    if relative_bias.shape != expected or not relative_bias.is_floating_point():
        raise ValueError(
            f"relative_bias must be floating-point [Hq, Lq + Lk - 1] = {list(expected)}, "
            f"got {relative_bias.dtype} {list(relative_bias.shape)}."
        )


def _checked_alpha(alpha: float | Tensor, query: Tensor) -> float | Tensor:
    """Return a float where one number says it all, else a tensor [Hq]."""
    if not isinstance(alpha, Tensor):
        if not 1.0 <= alpha <= 2.0:
            raise ValueError(f"alpha is {alpha}, but it must be in [1, 2].")
        return float(alpha)
    heads = query.shape[1]
    if alpha.shape not in ((), (heads,)):
        raise ValueError(
            f"alpha must be a number, a 0-d tensor or one value for each of the {heads} "
            f"query heads, got shape {list(alpha.shape)}."
        )
    if alpha.device != query.device:
        raise ValueError(f"alpha is on {alpha.device}, but query is on {query.device}.")
    alpha = alpha.expand(heads)
    values = alpha.detach().tolist()
    for head, value in enumerate(values):
        if not 1.0 <= value <= 2.0:
            raise ValueError(f"alpha of head {head} is {value:.6g}, but it must be in [1, 2].")
    is_learned = alpha.requires_grad and torch.is_grad_enabled()
    return values[0] if not is_learned and len(set(values)) == 1 else alpha


def _checked_padding(options: Options, query: Tensor, key: Tensor) -> Padding | None:
    given = {"key_start": options.key_start, "key_length": options.key_length}
    for name, bound in given.items():
        if bound is None:
            continue
        if bound.shape != query.shape[:1] or bound.is_floating_point() or bound.is_complex():
            raise ValueError(
                f"{name} must hold one integer for each of the {query.shape[0]} batch rows, "
                f"got {bound.dtype} {list(bound.shape)}."
            )
        if options.cu_seqlens_q is not None or options.cu_seqlens_k is not None:
            raise ValueError(f"{name} can't be combined with cu_seqlens: leave padding out.")
    if options.key_start is None and options.key_length is None:
        return None
    like = query.new_empty(query.shape[:1], dtype=torch.int64)
    start = torch.zeros_like(like) if options.key_start is None else options.key_start
    full = torch.full_like(like, key.shape[2])
    end = full if options.key_length is None else options.key_length
    return Padding(start.long(), end.long())


def _params(query: Tensor, key: Tensor, options: Options) -> AttentionParams:
    default_scale = max(query.shape[3], 1) ** -0.5
    left, right = _band(options)
    return AttentionParams(
        scale=default_scale if options.scale is None else float(options.scale),
        segments=_segments(query, key, options),
        left=left,
        right=right,
        dropout_p=float(options.dropout_p),
        seed=_draw_seed() if options.dropout_p else 0,
    )


def _draw_seed() -> int:
    limit = 2**63
    return int(torch.randint(-limit, limit - 1, (), dtype=torch.int64))


def _band(options: Options) -> tuple[int, int]:
    window = options.window
    left, right = UNLIMITED, UNLIMITED
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
    if left < 0 or right < 0:
        raise ValueError(f"window is {window}, but it must be 0 or more keys on either side.")
    return left, 0 if options.is_causal else right


def _segments(query: Tensor, key: Tensor, options: Options) -> tuple[Segment, ...]:
    if options.cu_seqlens_q is None and options.cu_seqlens_k is None:
        return (Segment(0, query.shape[2], 0, key.shape[2]),)
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together.")
    if query.shape[0] != 1:
        raise ValueError(f"Packed sequences need a batch of 1, got {query.shape[0]} rows.")
    queries = _checked_bounds("cu_seqlens_q", options.cu_seqlens_q, query.shape[2])
    keys = _checked_bounds("cu_seqlens_k", options.cu_seqlens_k, key.shape[2])
    if len(queries) != len(keys):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(queries)} "
            f"and {len(keys)}."
        )
    spans = zip(pairwise(queries), pairwise(keys), strict=True)
    return tuple(Segment(*q_span, *k_span) for q_span, k_span in spans)


def _checked_bounds(name: str, bounds: Tensor, length: int) -> list[int]:
    if bounds.dim() != 1 or bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 or int64 [S + 1], got {bounds.dtype} {list(bounds.shape)}."
        )
    values: list[int] = bounds.tolist()
    rises = all(a <= b for a, b in pairwise(values))
    if not values or values[0] != 0 or values[-1] != length or not rises:
        shown = values if len(values) <= 8 else [*values[:7], math.inf]
        raise ValueError(
            f"{name} must rise from 0 to the packed length {length} without a decrease, "
            f"got {shown}."
        )
    return values
