"""Device functions of both passes: rows of a matrix, scores with their masks, dropout."""

import triton
import triton.language as tl

from sparseformer.kernels.entmax_attention.powers import (
    learned_alpha_term,
    learned_powers,
    tile_powers,
)


@triton.jit
def load_rows(base, rows, mask, stride_row, stride_col, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows of a matrix, [len(rows), BLOCK], 0 where masked and beyond WIDTH."""
    cols = tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    if WIDTH == BLOCK:
        inside = mask[:, None]
    else:
        inside = mask[:, None] & (cols < WIDTH)[None, :]
    return tl.load(base + offsets, mask=inside, other=0.0)


@triton.jit
def store_rows(
    base, tile, rows, mask, stride_row, stride_col, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Store rows of a matrix in its dtype, leaving out what is masked or beyond WIDTH."""
    cols = tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    inside = mask[:, None] & (cols < WIDTH)[None, :]
    tl.store(base + offsets, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def tile_scores(
    query,
    key,
    scale,
    bias_ptr,
    rows_ptr,
    offs_m,
    num_queries,
    offs_n,
    num_keys,
    needs_mask,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return scale q k^T + bias, [BLOCK_M, BLOCK_N], -inf where a query doesn't see a key.

    The bounds are read where they are needed, so that they cost most tiles neither time nor
    registers.

    Args:
        query: [BLOCK_M, BLOCK_D].
        key: [BLOCK_N, BLOCK_D].
        scale: of the scores.
        bias_ptr: a head's bias over offsets, read only with HAS_BIAS.
        rows_ptr: RowBounds.rows of one batch row.
        offs_m: the queries.
        num_queries: Lq.
        offs_n: the keys.
        num_keys: Lk.
        needs_mask: false where every query of the tile sees every key.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=ACC) * scale
    if HAS_BIAS:
        scores += tile_bias(bias_ptr, rows_ptr, offs_m, num_queries, offs_n, num_keys, ACC)
    if needs_mask:
        first = tl.load(rows_ptr + offs_m, mask=offs_m < num_queries, other=0)
        end = tl.load(rows_ptr + num_queries + offs_m, mask=offs_m < num_queries, other=0)
        visible = (offs_n[None, :] >= first[:, None]) & (offs_n[None, :] < end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def tile_bias(
    bias_ptr,
    rows_ptr,
    offs_m,
    num_queries,
    offs_n,
    num_keys,
    DTYPE: tl.constexpr,
):
    """Return a head's bias over a tile; anything finite where a query doesn't see a key."""
    base = tl.load(rows_ptr + 2 * num_queries + offs_m, mask=offs_m < num_queries, other=0)
    entry = base[:, None] + offs_n[None, :]
    # Between packed sequences an offset may lie outside of the bias.
    inside = (entry >= 0) & (entry < num_queries + num_keys - 1)
    return tl.load(bias_ptr + entry, mask=inside, other=0.0).to(DTYPE)


@triton.jit
def dropout_keep(entry, seed, bound):
    """Return whether SplitMix64 keeps an entry of the score matrix, as masks.dropout_keep does.

    Args:
        entry: int64, ((b Hq + h) Lq + i) Lk + j.
        seed: int64.
        bound: int64, (1 - dropout_p) 2**64 - 2**63.
    """
    # The constants are those of Steele et al. 2014, read as signed numbers.
    state = entry * -7046029254386353131 + seed
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return state < bound


@triton.jit
def tile_gradient(
    scores,
    grad_weights,
    threshold,
    delta,
    entry,
    seed,
    keep_bound,
    keep_scale,
    eps,
    EPS: tl.constexpr,
    QUICK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    WANT_TERM: tl.constexpr,
):
    """Return what dropout leaves of p (not yet scaled), u, dP - delta and, on request, eps**2 p g.

    Args:
        scores: scale q k^T + bias, -inf where a query does not see a key.
        grad_weights: dO v^T, the gradient of the probabilities after dropout.
        threshold: t of each query, broadcastable; inf for a query without keys.
        delta: sum u dP / sum u of each query, broadcastable.
        entry: int64, index of each score in the whole matrix, read only with HAS_DROPOUT.
        seed: of dropout_keep.
        keep_bound: of dropout_keep.
        keep_scale: 1 / (1 - dropout_p).
        eps: alpha - 1, read only where EPS is None.
        QUICK: of tile_powers.
        WANT_TERM: whether eps**2 p g is wanted, for a learned alpha; else anything is returned.
    """
    if WANT_TERM:
        probs, slopes, fall = learned_powers(scores - threshold, eps, QUICK)
        term = learned_alpha_term(probs, slopes, fall)
    else:
        probs, slopes = tile_powers(scores - threshold, eps, EPS, QUICK)
        term = probs
    weights = probs
    if HAS_DROPOUT:
        keep = dropout_keep(entry, seed, keep_bound)
        weights = tl.where(keep, probs, 0.0)
        grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
    return weights, slopes, grad_weights - delta, term
