"""Attention whose probabilities are entmax, top-k or top-p of the scores: what callers import."""

from torch import Tensor

from sparseformer.kernels.common.backends import Backend
from sparseformer.kernels.entmax_attention.checks import (
    Options,
    entmax_arguments,
    topk_arguments,
    topp_arguments,
)
from sparseformer.kernels.entmax_attention.operators import attend, attend_with_stats
from sparseformer.kernels.entmax_attention.stats import AttentionStats


def entmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    relative_bias: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend with alpha-entmax in place of softmax: O = entmax(scale Q K^T + bias, alpha) V.

    alpha = 1 is softmax, alpha = 2 sparsemax; in between, keys far below the largest score get a
    weight of exactly 0. Memory grows with L, not with Lq x Lk: the scores are computed in blocks,
    and again in the backward pass. A query that sees no key gives zeros and zero gradients.

    Args:
        query: [B, Hq, Lq, D], floating point, any strides. 16-bit inputs are computed in fp32,
            also under autocast, where the three dtypes may differ.
        key: [B, Hkv, Lk, D]; query head h reads key head h // (Hq / Hkv), without a copy.
        value: [B, Hkv, Lk, Dv].
        alpha: in [1, 2]: a number, or a 0-d or [Hq] tensor, which may require a gradient.
        is_causal: Query i sees keys j <= i + Lk - Lq: the last query sees every key, also when
            Lq and Lk differ. The alignment counts positions, padding included.
        key_start: int [B], the first key that row b of the batch may see; else 0. With left
            padding, the number of padding slots.
        key_length: int [B], one past the last key that row b may see, counted from slot 0 (so
            key_start <= j < key_length); else Lk. With right padding, the length of the row.
            What stands in the slots outside (also NaN) reaches neither output nor gradients.
        cu_seqlens_q: int32 or int64 [S + 1], where each of S sequences starts along Lq, from 0
            to Lq. B is 1; the result equals one call per sequence, masks aligned in each.
        cu_seqlens_k: the same along Lk.
        relative_bias: [Hq, Lq + Lk - 1], added to the scaled scores, differentiable. Entry
            j - i + Lq - 1 belongs to query i and key j (packed: positions in their sequence). -inf
            or the most negative number of the dtype hides a key.
        window: w or (left, right), 0 or more: query i sees keys from i + Lk - Lq - left to
            i + Lk - Lq + right, so left + 1 + right keys; with is_causal, right is 0.
        dropout_p: share of the probabilities that are zeroed, in [0, 1); the others are scaled by
            1 / (1 - dropout_p). The draw is seeded from torch's generator at each call.
        scale: of the scores; else D ** -0.5.
        backend: "auto" is Triton on a GPU; on a CPU "cpp", or "pytorch" where no C++ compiler is.
            "triton" on a CPU needs TRITON_INTERPRET=1.

    Returns:
        [B, Hq, Lq, Dv] in the dtype of query.

    Raises:
        ValueError: for shapes, dtypes, devices or values that don't fit, which it names.

    Keys that are hidden from some queries only, by is_causal or window, must be finite. Second
    derivatives are not supported.

    Sources: Peters, Niculae and Martins 2019 (entmax); Correia, Niculae and Martins 2019 (alpha
    learned by each head).
    """
    options = Options(
        is_causal,
        key_start,
        key_length,
        cu_seqlens_q,
        cu_seqlens_k,
        relative_bias,
        window,
        dropout_p,
        scale,
        backend,
    )
    return attend(entmax_arguments(query, key, value, alpha, options))


def entmax_attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    relative_bias: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, AttentionStats]:
    """Return entmax_attention(...) and how sparse it was; the statistics carry no gradient."""
    options = Options(
        is_causal,
        key_start,
        key_length,
        cu_seqlens_q,
        cu_seqlens_k,
        relative_bias,
        window,
        dropout_p,
        scale,
        backend,
    )
    return attend_with_stats(entmax_arguments(query, key, value, alpha, options))


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k: int,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    relative_bias: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend with the softmax over the k largest scores of each query (Gupta et al. 2021).

    The gradient is the softmax's on the kept set, which is taken as constant. The other arguments
    are those of entmax_attention.

    Args:
        k: keys that a query keeps, 1 or more; a query that sees fewer keeps them all.
    """
    options = Options(
        is_causal,
        key_start,
        key_length,
        cu_seqlens_q,
        cu_seqlens_k,
        relative_bias,
        window,
        dropout_p,
        scale,
        backend,
    )
    return attend(topk_arguments(query, key, value, k, options))


def topk_attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k: int,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    relative_bias: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, AttentionStats]:
    """Return topk_attention(...) and how sparse it was; the statistics carry no gradient."""
    options = Options(
        is_causal,
        key_start,
        key_length,
        cu_seqlens_q,
        cu_seqlens_k,
        relative_bias,
        window,
        dropout_p,
        scale,
        backend,
    )
    return attend_with_stats(topk_arguments(query, key, value, k, options))


def topp_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    relative_bias: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend with the softmax over the fewest largest scores that hold the softmax mass p.

    The gradient is the softmax's on the kept set, which is taken as constant. The other arguments
    are those of entmax_attention.

    Args:
        p: softmax mass that a query keeps at least, in (0, 1]; 1 is softmax.
    """
    options = Options(
        is_causal,
        key_start,
        key_length,
        cu_seqlens_q,
        cu_seqlens_k,
        relative_bias,
        window,
        dropout_p,
        scale,
        backend,
    )
    return attend(topp_arguments(query, key, value, p, options))


def topp_attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float,
    *,
    is_causal: bool = False,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    relative_bias: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, AttentionStats]:
    """Return topp_attention(...) and how sparse it was; the statistics carry no gradient."""
    options = Options(
        is_causal,
        key_start,
        key_length,
        cu_seqlens_q,
        cu_seqlens_k,
        relative_bias,
        window,
        dropout_p,
        scale,
        backend,
    )
    return attend_with_stats(topp_arguments(query, key, value, p, options))
