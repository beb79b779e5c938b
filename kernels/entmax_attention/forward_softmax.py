"""Attention at alpha = 1, which is softmax: one pass over the visible tiles, all of them active."""

import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax.device import LN_2, LOG2_E
from sparseformer.kernels.entmax_attention.arguments import Saved
from sparseformer.kernels.entmax_attention.backward_problem import named_strides
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward_device import (
    key_spans,
    load_bounds,
)
from sparseformer.kernels.entmax_attention.forward_problem import Problem
from sparseformer.kernels.entmax_attention.tiles import (
    dropout_keep,
    load_rows,
    store_rows,
    tile_scores,
)


def softmax_output(
    problem: Problem, launch: Launch, blocks: Blocks, output: Tensor, saved: Saved
) -> None:
    """Fill the output and, if a backward pass follows, what it needs; two products per tile."""
    keep = saved.direction.numel() > 0
    names = ("EPS", "HAS_BIAS")
    constants = {name: x for name, x in problem.constants().items() if name not in names}
    pointers = {name: x for name, x in problem.pointers().items() if name != "alpha_ptr"}
    _softmax_attention_forward_kernel[problem.grid(blocks)](
        **pointers,
        output_ptr=output,
        threshold_ptr=saved.rows if keep else None,
        direction_ptr=saved.direction if keep else None,
        words_ptr=saved.tiles if keep else None,
        **problem.strides(),
        **named_strides("o", output),
        **problem.sizes(),
        **problem.scalars(),
        **constants,
        HAS_BIAS=problem.bias is not None,
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        KEEP=keep,
        **launch.options(),
    )


@triton.jit
def _softmax_attention_forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
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
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(num_queries, BLOCK_M)
    batch_head = program // blocks
    batch, head = batch_head // heads, batch_head % heads
    # Under a causal mask the last block has the most work: it starts first.
    block = blocks - 1 - (program % blocks).to(tl.int32)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_ptr += batch * bounds_step * 3 * num_queries
    first, end = load_bounds(rows_ptr, offs_m, num_queries, num_keys)
    low, high, all_low, all_high = key_spans(first, end, num_keys)
    first_tile, last_tile = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
    # A key outside of the batch row's span is padding and may hold anything.
    spans_ptr += batch * bounds_step * 4
    key_start, key_end = tl.load(spans_ptr), tl.load(spans_ptr + 1)

    query_ptr += batch * stride_qb + head * stride_qh
    query = load_rows(query_ptr, offs_m, first < end, stride_ql, stride_qd, DIM, BLOCK_D)
    key_ptr += batch * stride_kb + head // group * stride_kh
    value_ptr += batch * stride_vb + head // group * stride_vh
    if HAS_BIAS:
        bias_ptr += head * (num_queries + num_keys - 1)
    in_range = offs_m < num_queries
    at_row = batch_head * num_queries + offs_m

    peak = tl.full([BLOCK_M], float("-inf"), ACC)
    mass = tl.zeros([BLOCK_M], ACC)
    output = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    for n in range(first_tile, last_tile):
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = (offs_n >= key_start) & (offs_n < key_end)
        key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
        needs_mask = (n * BLOCK_N < all_low) | (n * BLOCK_N + BLOCK_N > all_high)
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
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that hasn't seen a key yet has no finite score to subtract.
        level = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        shrink = tl.exp2((peak - level) * LOG2_E)
        probs = tl.exp2((scores - level[:, None]) * LOG2_E)
        mass = mass * shrink + tl.sum(probs, 1)
        peak = new_peak
        value = load_rows(value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V)
        if HAS_DROPOUT:
            entry = (at_row * num_keys)[:, None] + offs_n[None, :]
            probs = tl.where(dropout_keep(entry, tl.load(seed_ptr), keep_bound), probs, 0.0)
        output = output * shrink[:, None]
        output = tl.dot(probs.to(value.dtype), value, output, input_precision="ieee", out_dtype=ACC)

    has_keys = peak > float("-inf")
    total = tl.where(has_keys, mass, 1.0)
    output = output * (keep_scale / total)[:, None]
    output_ptr += batch * stride_ob + head * stride_oh
    store_rows(output_ptr, output, offs_m, in_range, stride_ol, stride_od, VALUE_DIM, BLOCK_V)
    if KEEP:
        threshold = tl.where(has_keys, peak + tl.log2(total) * LN_2, float("inf"))
        tl.store(threshold_ptr + at_row, threshold, mask=in_range)
        # At alpha = 1 u is p.
        direction_ptr += batch_head * num_queries * VALUE_DIM
        store_rows(direction_ptr, output, offs_m, in_range, VALUE_DIM, 1, VALUE_DIM, BLOCK_V)
        num_words = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), 32)
        words_ptr += (batch_head * blocks + block) * num_words
        for w in range(0, num_words):
            tile = w * 32 + tl.arange(0, 32)
            is_seen = (tile >= first_tile) & (tile < last_tile)
            word = tl.sum(tl.where(is_seen, 1 << tl.arange(0, 32), 0), 0)
            tl.store(words_ptr + w, word)
