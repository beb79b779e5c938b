"""What callers may pass to attention, checked once, and the operator's arguments made of it."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen, check_backend
from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.masks import CHUNK_ELEMENTS, UNLIMITED, Segment

BACKENDS: dict[str, tuple[Chosen, ...]] = {
    "entmax": ("pytorch", "cpp", "triton"),
    "topk": ("pytorch",),
    "topp": ("pytorch",),
}


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


def entmax_arguments(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: Options
) -> Arguments:
    """Check the arguments of entmax attention."""
    arguments = _arguments(query, key, value, "entmax", 1.0, options)
    if not isinstance(alpha, Tensor):
        if not 1.0 <= alpha <= 2.0:
            raise ValueError(f"alpha is {alpha}, but it must be in [1, 2].")
        return arguments._replace(parameter=float(alpha))
    heads = query.shape[1]
    if alpha.shape not in ((), (heads,)):
        raise ValueError(
            f"alpha must be a number, a 0-d tensor or one value for each of the {heads} "
            f"query heads, got shape {list(alpha.shape)}."
        )
    if alpha.device != query.device:
        raise ValueError(f"alpha is on {alpha.device}, but query is on {query.device}.")
    return arguments._replace(alpha=alpha.expand(heads))


def topk_arguments(
    query: Tensor, key: Tensor, value: Tensor, k: int, options: Options
) -> Arguments:
    """Check the arguments of top-k attention."""
    if k < 1:
        raise ValueError(f"k is {k}, but a query must keep 1 key or more.")
    return _arguments(query, key, value, "topk", float(k), options)


def topp_arguments(
    query: Tensor, key: Tensor, value: Tensor, p: float, options: Options
) -> Arguments:
    """Check the arguments of top-p attention."""
    if not 0.0 < p <= 1.0:
        raise ValueError(f"p is {p}, but it must be in (0, 1].")
    return _arguments(query, key, value, "topp", p, options)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, mapping: str, parameter: float, options: Options
) -> Arguments:
    """Check the arguments that do not depend on the map."""
    check_backend(f"{mapping}_attention", options.backend, BACKENDS[mapping])
    _check_tensors(query, key, value)
    _check_bias(options.relative_bias, query, key)
    if not 0.0 <= options.dropout_p < 1.0:
        raise ValueError(f"dropout_p is {options.dropout_p}, but it must be in [0, 1).")
    _check_padding(options, query)
    _check_packing(options, query)
    left, right = _band(options)
    default_scale = max(query.shape[3], 1) ** -0.5
    return Arguments(
        query,
        key,
        value,
        None,
        options.relative_bias,
        options.key_start,
        options.key_length,
        options.cu_seqlens_q,
        options.cu_seqlens_k,
        _draw_seed(query.device) if options.dropout_p else None,
        mapping,
        parameter,
        left,
        right,
        float(options.dropout_p),
        default_scale if options.scale is None else float(options.scale),
        options.backend,
        CHUNK_ELEMENTS,
    )


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


def checked_alpha(alpha: Tensor | None, parameter: float) -> float | Tensor:
    """Return one number where all heads share it, else the tensor [Hq]; reads alpha's values."""
    if alpha is None:
        return parameter
    values: list[float] = alpha.tolist()
    for head, value in enumerate(values):
        if not 1.0 <= value <= 2.0:
            raise ValueError(f"alpha of head {head} is {value:.6g}, but it must be in [1, 2].")
    return values[0] if len(set(values)) == 1 else alpha


def _check_padding(options: Options, query: Tensor) -> None:
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


def _draw_seed(device: torch.device) -> Tensor:
    limit = 2**63
    return torch.randint(-limit, limit - 1, (), dtype=torch.int64, device=device)


def _band(options: Options) -> tuple[int, int]:
    window = options.window
    left, right = UNLIMITED, UNLIMITED
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
    if left < 0 or right < 0:
        raise ValueError(f"window is {window}, but it must be 0 or more keys on either side.")
    return left, 0 if options.is_causal else right


def _check_packing(options: Options, query: Tensor) -> None:
    given = {"cu_seqlens_q": options.cu_seqlens_q, "cu_seqlens_k": options.cu_seqlens_k}
    if options.cu_seqlens_q is None and options.cu_seqlens_k is None:
        return
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together.")
    if query.shape[0] != 1:
        raise ValueError(f"Packed sequences need a batch of 1, got {query.shape[0]} rows.")
    for name, bounds in given.items():
        assert bounds is not None
        if bounds.dim() != 1 or bounds.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be int32 or int64 [S + 1], got {bounds.dtype} {list(bounds.shape)}."
            )
    sizes = [options.cu_seqlens_q.shape[0], options.cu_seqlens_k.shape[0]]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {sizes[0]} and {sizes[1]}."
        )


def checked_segments(arguments: Arguments) -> tuple[Segment, ...]:
    """Return the sequences of a call; reads the values of cu_seqlens."""
    num_queries, num_keys = arguments.query.shape[2], arguments.key.shape[2]
    if arguments.cu_seqlens_q is None or arguments.cu_seqlens_k is None:
        return (Segment(0, num_queries, 0, num_keys),)
    queries = _checked_bounds("cu_seqlens_q", arguments.cu_seqlens_q, num_queries)
    keys = _checked_bounds("cu_seqlens_k", arguments.cu_seqlens_k, num_keys)
    spans = zip(pairwise(queries), pairwise(keys), strict=True)
    return tuple(Segment(*q_span, *k_span) for q_span, k_span in spans)


def _checked_bounds(name: str, bounds: Tensor, length: int) -> list[int]:
    values: list[int] = bounds.tolist()
    rises = all(a <= b for a, b in pairwise(values))
    if not values or values[0] != 0 or values[-1] != length or not rises:
        shown = values if len(values) <= 8 else [*values[:7], math.inf]
        raise ValueError(
            f"{name} must rise from 0 to the packed length {length} without a decrease, "
            f"got {shown}."
        )
    return values
