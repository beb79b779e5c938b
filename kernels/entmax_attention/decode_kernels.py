"""The kernels of decoding: scores of a tile, t of a row, the output of a split."""

import triton
import triton.language as tl

from sparseformer.kernels.entmax.device import MIN_EPS, newton_step, powers
from sparseformer.kernels.entmax_attention.sketch import (
    MAX_SOLVE_STEPS,
    dropped_mass,
    sketch_insert,
    solve_on_sketch,
)
from sparseformer.kernels.entmax_attention.tiles import dropout_keep, load_rows


@triton.jit
def _entmax_attention_decode_scores_kernel(
    query_ptr,
    key_ptr,
    bias_ptr,
    rows_ptr,
    spans_ptr,
    scores_ptr,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    bounds_step,
    heads,
    group,
    num_queries,
    num_keys,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(num_keys, BLOCK_N)
    batch_key_head, tile = program // tiles, (program % tiles).to(tl.int32)
    key_heads = heads // group
    batch, key_head = batch_key_head // key_heads, batch_key_head % key_heads
    rows = tl.arange(0, BLOCK_M)
    in_range = rows < group * num_queries
    head, offs_m = key_head * group + rows // num_queries, rows % num_queries

    rows_ptr += batch * bounds_step * 3 * num_queries
    first = tl.load(rows_ptr + offs_m, mask=in_range, other=num_keys)
    end = tl.load(rows_ptr + num_queries + offs_m, mask=in_range, other=0)
    spans_ptr += batch * bounds_step * 4
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n >= tl.load(spans_ptr)) & (offs_n < tl.load(spans_ptr + 1))
    # Every row has a head of its own, so that its address isn't a multiple of one stride.
    cols = tl.arange(0, BLOCK_D)
    places = head * stride_qh + offs_m.to(tl.int64) * stride_ql
    query = tl.load(
        query_ptr + batch * stride_qb + places[:, None] + cols.to(tl.int64)[None, :] * stride_qd,
        mask=(first < end)[:, None] & (cols < DIM)[None, :],
        other=0.0,
    )
    key_ptr += batch * stride_kb + key_head * stride_kh
    key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=ACC) * scale
    visible = (offs_n[None, :] >= first[:, None]) & (offs_n[None, :] < end[:, None])
    if HAS_BIAS:
        base = tl.load(rows_ptr + 2 * num_queries + offs_m, mask=in_range, other=0)
        base = base + head * (num_queries + num_keys - 1)
        scores += tl.load(bias_ptr + base[:, None] + offs_n[None, :], mask=visible, other=0.0)
    scores = tl.where(visible, scores, float("-inf"))
    at = (batch_key_head * group * num_queries + rows)[:, None] * num_keys + offs_n[None, :]
    tl.store(scores_ptr + at, scores, mask=in_range[:, None] & (offs_n < num_keys)[None, :])


@triton.jit
def _entmax_attention_decode_threshold_kernel(
    scores_ptr,
    alpha_ptr,
    threshold_ptr,
    heads,
    num_queries,
    num_keys,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    eps = 0.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + row // num_queries % heads) - 1.0, MIN_EPS)
    scores_ptr += row * num_keys
    lanes = tl.arange(0, LANES)[None, :]
    top1 = tl.full([1, LANES], float("-inf"), ACC)
    top2, top3, top4 = top1, top1, top1
    for start in range(0, num_keys, LANES):
        at = start + lanes
        scores = tl.load(scores_ptr + at, mask=at < num_keys, other=float("-inf"))
        top1, top2, top3, top4 = sketch_insert(scores, top1, top2, top3, top4, DEPTH)
    peak = tl.max(top1, 1)
    has_keys = peak > float("-inf")
    threshold = solve_on_sketch(
        tl.where(has_keys, peak, 0.0),
        top1,
        top2,
        top3,
        top4,
        eps,
        MAX_SOLVE_STEPS,
        0.0,
        ROUNDING,
        EPS,
        False,
        DEPTH,
    )
    # Any is too much here: only whether it is 0 counts.
    dropped = dropped_mass(threshold, top1, top2, top3, top4, eps, float("inf"), EPS, False, DEPTH)
    refine = tl.max((has_keys & (dropped > 0.0)).to(tl.int32), 0)
    while refine != 0:
        mass = tl.zeros([1], ACC)
        slope = tl.zeros([1], ACC)
        for start in range(0, num_keys, LANES):
            at = start + lanes
            scores = tl.load(scores_ptr + at, mask=at < num_keys, other=float("-inf"))
            probs, slopes = powers(scores - threshold[:, None], eps, EPS)
            mass += tl.sum(probs, 1)
            slope += tl.sum(slopes, 1)
        # Climbing ends in rounding, where a step may go down.
        step = tl.maximum(newton_step(mass, slope, eps, EPS), 0.0)
        threshold += step
        refine = tl.max((step > ROUNDING * (1.0 + tl.abs(threshold))).to(tl.int32), 0)
    threshold = tl.where(has_keys, threshold, float("inf"))
    tl.store(threshold_ptr + row + tl.arange(0, 1), threshold)


@triton.jit
def _entmax_attention_decode_output_kernel(
    value_ptr,
    alpha_ptr,
    spans_ptr,
    seed_ptr,
    scores_ptr,
    threshold_ptr,
    masses_ptr,
    parts_ptr,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    bounds_step,
    heads,
    group,
    num_queries,
    num_keys,
    tiles_per_split,
    keep_bound,
    EPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch_key_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    key_heads = heads // group
    batch, key_head = batch_key_head // key_heads, batch_key_head % key_heads
    num_rows = group * num_queries
    rows = tl.arange(0, BLOCK_M)
    in_range = rows < num_rows
    at_row = batch_key_head * num_rows + rows
    eps = 0.0
    if EPS is None:
        head = key_head * group + rows // num_queries
        alpha = tl.load(alpha_ptr + head, mask=in_range, other=2.0)
        eps = tl.maximum(alpha - 1.0, MIN_EPS)[:, None]
    threshold = tl.load(threshold_ptr + at_row, mask=in_range, other=float("inf"))
    spans_ptr += batch * bounds_step * 4
    key_start, key_end = tl.load(spans_ptr), tl.load(spans_ptr + 1)
    value_ptr += batch * stride_vb + key_head * stride_vh

    mass = tl.zeros([BLOCK_M], ACC)
    output = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(num_keys, BLOCK_N))
    for n in range(first_tile, last_tile):
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        scores = tl.load(
            scores_ptr + at_row[:, None] * num_keys + offs_n[None, :],
            mask=in_range[:, None] & (offs_n < num_keys)[None, :],
            other=float("-inf"),
        )
        probs, _ = powers(scores - threshold[:, None], eps, EPS)
        tile_mass = tl.sum(probs, 1)
        if tl.max(tile_mass, 0) > 0.0:
            mass += tile_mass
            mask_n = (offs_n >= key_start) & (offs_n < key_end)
            value = load_rows(value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V)
            if HAS_DROPOUT:
                entry = (at_row * num_keys)[:, None] + offs_n[None, :]
                probs = tl.where(dropout_keep(entry, tl.load(seed_ptr), keep_bound), probs, 0.0)
            output = tl.dot(
                probs.to(value.dtype), value, output, input_precision="ieee", out_dtype=ACC
            )
    at = split * tl.num_programs(0) * num_rows + at_row
    tl.store(masses_ptr + at, mass, mask=in_range)
    cols = tl.arange(0, BLOCK_V)
    tl.store(
        parts_ptr + at[:, None] * VALUE_DIM + cols[None, :],
        output,
        mask=in_range[:, None] & (cols < VALUE_DIM)[None, :],
    )
