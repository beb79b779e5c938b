"""Attention where all keys that a block of queries sees fit in one tile: scores computed once."""

import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax.device import MIN_EPS, newton_step
from sparseformer.kernels.entmax_attention.arguments import Saved
from sparseformer.kernels.entmax_attention.backward_problem import named_strides
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward_device import (
    key_spans,
    load_bounds,
)
from sparseformer.kernels.entmax_attention.forward_problem import Problem
from sparseformer.kernels.entmax_attention.powers import tile_powers
from sparseformer.kernels.entmax_attention.sketch import MAX_SOLVE_STEPS, solve_on_sketch
from sparseformer.kernels.entmax_attention.tiles import (
    dropout_keep,
    load_rows,
    store_rows,
    tile_scores,
)


def one_tile_output(
    problem: Problem,
    span: int,
    close: float,
    rounding: float,
    launch: Launch,
    blocks: Blocks,
    output: Tensor,
    saved: Saved,
) -> None:
    """Fill the output and, if a backward pass follows, what it needs; three products per tile.

    Args:
        problem: whose blocks of queries see `span` keys at most, counted from a multiple of
            blocks.keys.
        span: keys of the tile, a power of 2.
        close: how far sum p may be from 1 before a last step, of Plan.
        rounding: a step below this share of t is rounding.
        launch: warps and stages.
        blocks: queries of a program, and the keys that a bit of saved.tiles stands for.
        output: [B, Hq, Lq, Dv], filled.
        saved: filled if it isn't empty.
    """
    keep = saved.direction.numel() > 0
    _entmax_attention_one_tile_kernel[problem.grid(blocks)](
        **problem.pointers(),
        output_ptr=output,
        threshold_ptr=saved.rows if keep else None,
        direction_ptr=saved.direction if keep else None,
        words_ptr=saved.tiles if keep else None,
        **problem.strides(),
        **named_strides("o", output),
        **problem.sizes(),
        **problem.scalars(),
        **problem.constants(),
        BLOCK_M=blocks.queries,
        BLOCK_N=span,
        TILE_KEYS=blocks.keys,
        CLOSE=close,
        ROUNDING=rounding,
        KEEP=keep,
        **launch.options(),
    )


@triton.jit
def _entmax_attention_one_tile_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    alpha_ptr,
    rows_ptr,
    spans_ptr,
    seed_ptr,
    output_ptr,
    threshold_ptr,
    direction_ptr,
    words_ptr,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ol,
    stride_od,
    bounds_step,
    heads,
    group,
    num_queries,
    num_keys,
    scale,
    keep_scale,
    keep_bound,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CLOSE: tl.constexpr,
    ROUNDING: tl.constexpr,
    KEEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(num_queries, BLOCK_M)
    batch_head = program // blocks
    batch, head = batch_head // heads, batch_head % heads
    block = (program % blocks).to(tl.int32)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_ptr += batch * bounds_step * 3 * num_queries
    first, end = load_bounds(rows_ptr, offs_m, num_queries, num_keys)
    low, _, all_low, all_high = key_spans(first, end, num_keys)
    first_tile = low // TILE_KEYS
    start_n = first_tile * TILE_KEYS
    offs_n = start_n + tl.arange(0, BLOCK_N)
    # A key outside of the batch row's span is padding and may hold anything.
    spans_ptr += batch * bounds_step * 4
    mask_n = (offs_n >= tl.load(spans_ptr)) & (offs_n < tl.load(spans_ptr + 1))

    query_ptr += batch * stride_qb + head * stride_qh
    query = load_rows(query_ptr, offs_m, first < end, stride_ql, stride_qd, DIM, BLOCK_D)
    QUICK: tl.constexpr = query.dtype.primitive_bitwidth == 16
    key_ptr += batch * stride_kb + head // group * stride_kh
    key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
    if HAS_BIAS:
        bias_ptr += head * (num_queries + num_keys - 1)
    eps = 0.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)
    needs_mask = (start_n < all_low) | (start_n + BLOCK_N > all_high)
    scores = tile_scores(
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
        HAS_BIAS,
        ACC,
    )
    peak = tl.max(scores, 1)
    has_keys = peak > float("-inf")
    # The whole row is its own sketch.
    threshold = solve_on_sketch(
        tl.where(has_keys, peak, 0.0),
        scores,
        scores,
        scores,
        scores,
        eps,
        MAX_SOLVE_STEPS,
        CLOSE,
        ROUNDING,
        EPS,
        QUICK,
        1,
    )
    probs, slopes = tile_powers(scores - threshold[:, None], eps, EPS, QUICK)
    mass, slope = tl.sum(probs, 1), tl.sum(slopes, 1)
    step = newton_step(mass, slope, eps, EPS)
    in_range = offs_m < num_queries
    at_row = batch_head * num_queries + offs_m
    if KEEP:
        tile_peaks = tl.max(tl.reshape(tl.max(probs, 0), [BLOCK_N // TILE_KEYS, TILE_KEYS]), 1)
        tiles = first_tile + tl.arange(0, BLOCK_N // TILE_KEYS)
        num_words = tl.cdiv(tl.cdiv(num_keys, TILE_KEYS), 32)
        words_ptr += (batch_head * blocks + block) * num_words
        for w in range(0, num_words):
            is_active = (tile_peaks > 0.0) & (tiles // 32 == w)
            tl.store(words_ptr + w, tl.sum(tl.where(is_active, 1 << (tiles % 32), 0), 0))

    value_ptr += batch * stride_vb + head // group * stride_vh
    value = load_rows(value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V)
    if HAS_DROPOUT:
        entry = (at_row * num_keys)[:, None] + offs_n[None, :]
        drawn = dropout_keep(entry, tl.load(seed_ptr), keep_bound)
        probs = tl.where(drawn, probs, 0.0)
        slopes = tl.where(drawn, slopes, 0.0)
    output = tl.dot(probs.to(value.dtype), value, input_precision="ieee", out_dtype=ACC)
    total = mass
    if KEEP:
        output_slope = output
        if EPS != 0.0:
            output_slope = tl.dot(
                slopes.to(value.dtype), value, input_precision="ieee", out_dtype=ACC
            )
        direction = output_slope * (keep_scale / tl.where(has_keys, slope, 1.0))[:, None]
        direction_ptr += batch_head * num_queries * VALUE_DIM
        store_rows(direction_ptr, direction, offs_m, in_range, VALUE_DIM, 1, VALUE_DIM, BLOCK_V)
        threshold = tl.where(has_keys, threshold + step, float("inf"))
        tl.store(threshold_ptr + at_row, threshold, mask=in_range)
        # The last step folded in: O(t + step) = O - step OU, normalised by what is left of Z.
        output -= step[:, None] * output_slope
        total = mass - step * slope
    output = output * (keep_scale / tl.where(has_keys, total, 1.0))[:, None]
    output_ptr += batch * stride_ob + head * stride_oh
    store_rows(output_ptr, output, offs_m, in_range, stride_ol, stride_od, VALUE_DIM, BLOCK_V)
