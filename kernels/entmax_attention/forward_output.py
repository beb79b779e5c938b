"""The last pass of attention: t refined where it is too far off, the output from active tiles."""

import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.entmax.device import MIN_EPS, newton_step
from sparseformer.kernels.entmax_attention.arguments import Saved
from sparseformer.kernels.entmax_attention.backward_problem import named_strides
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward_device import (
    key_spans,
    load_bounds,
    lowest_bit,
)
from sparseformer.kernels.entmax_attention.forward_problem import Problem, State
from sparseformer.kernels.entmax_attention.launch_table import Plan
from sparseformer.kernels.entmax_attention.powers import tile_powers
from sparseformer.kernels.entmax_attention.tiles import (
    dropout_keep,
    load_rows,
    store_rows,
    tile_scores,
)


def refine_and_output(
    problem: Problem,
    plan: Plan,
    rounding: float,
    blocks: Blocks,
    state: State,
    output: Tensor,
    saved: Saved,
) -> None:
    """Fill the output and, if a backward pass follows, its direction; refine the state.

    Per live tile one product for each refinement; three for the output, two if nothing is saved.
    """
    keep = saved.direction.numel() > 0
    _entmax_attention_output_kernel[problem.grid(blocks)](
        **problem.pointers(),
        **state.pointers(),
        output_ptr=output,
        direction_ptr=saved.direction if keep else None,
        **problem.strides(),
        **named_strides("o", output),
        **problem.sizes(),
        **problem.scalars(),
        **problem.constants(),
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        EXCESS=plan.excess,
        ROUNDING=rounding,
        KEEP=keep,
        **plan.launch.options(),
    )


@triton.jit
def _entmax_attention_output_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    alpha_ptr,
    rows_ptr,
    spans_ptr,
    seed_ptr,
    threshold_ptr,
    words_ptr,
    refine_ptr,
    output_ptr,
    direction_ptr,
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
    EXCESS: tl.constexpr,
    ROUNDING: tl.constexpr,
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
    first_word, last_word = low // BLOCK_N // 32, tl.cdiv(tl.cdiv(high, BLOCK_N), 32)
    # A key outside of the batch row's span is padding and may hold anything.
    spans_ptr += batch * bounds_step * 4
    key_start, key_end = tl.load(spans_ptr), tl.load(spans_ptr + 1)

    query_ptr += batch * stride_qb + head * stride_qh
    query = load_rows(query_ptr, offs_m, first < end, stride_ql, stride_qd, DIM, BLOCK_D)
    QUICK: tl.constexpr = query.dtype.primitive_bitwidth == 16
    key_ptr += batch * stride_kb + head // group * stride_kh
    value_ptr += batch * stride_vb + head // group * stride_vh
    if HAS_BIAS:
        bias_ptr += head * (num_queries + num_keys - 1)
    eps = 0.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)
    at_block = batch_head * blocks + block
    words_ptr += at_block * tl.cdiv(tl.cdiv(num_keys, BLOCK_N), 32)
    in_range = offs_m < num_queries
    at_row = batch_head * num_queries + offs_m
    threshold = tl.load(threshold_ptr + at_row, mask=in_range, other=float("inf"))

    # Newton's method over the tiles that may hold support, where the first pass did not do.
    state = tl.load(refine_ptr + at_block)
    refine = state & 1
    # Above the root, a tile of the support may weigh nothing: it keeps its bit. Newton's steps end
    # below.
    keeps_bit = state >> 1
    while refine != 0:
        mass = tl.zeros([BLOCK_M], ACC)
        slope = tl.zeros([BLOCK_M], ACC)
        for w in range(first_word, last_word):
            todo = tl.load(words_ptr + w)
            word = 0
            while todo != 0:
                bit = lowest_bit(todo)
                todo = todo & (todo - 1)
                start_n = (w * 32 + bit) * BLOCK_N
                offs_n = start_n + tl.arange(0, BLOCK_N)
                mask_n = (offs_n >= key_start) & (offs_n < key_end)
                key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
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
                probs, slopes = tile_powers(scores - threshold[:, None], eps, EPS, QUICK)
                tile_mass = tl.sum(probs, 1)
                mass += tile_mass
                slope += tl.sum(slopes, 1)
                is_live = (tl.max(tile_mass, 0) > 0.0).to(tl.int32) | keeps_bit
                word = word | (is_live << bit)
            tl.store(words_ptr + w, word)
        tl.debug_barrier()
        keeps_bit = 0
        step = newton_step(mass, slope, eps, EPS)
        threshold += step
        # The error after a step is a small share of the square of the one before.
        too_far = 0.25 * (mass - 1.0) * (mass - 1.0) > EXCESS
        moves = tl.abs(step) > ROUNDING * (1.0 + tl.abs(threshold))
        refine = tl.max((too_far & moves).to(tl.int32), 0)

    # Products with the values of active tiles; again only if t was too far off after all.
    output = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    output_slope = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    mass = tl.zeros([BLOCK_M], ACC)
    slope = tl.zeros([BLOCK_M], ACC)
    step = mass
    again = 1
    while again != 0:
        output = tl.zeros([BLOCK_M, BLOCK_V], ACC)
        output_slope = tl.zeros([BLOCK_M, BLOCK_V], ACC)
        mass = tl.zeros([BLOCK_M], ACC)
        slope = tl.zeros([BLOCK_M], ACC)
        for w in range(first_word, last_word):
            todo = tl.load(words_ptr + w)
            word = 0
            while todo != 0:
                bit = lowest_bit(todo)
                todo = todo & (todo - 1)
                start_n = (w * 32 + bit) * BLOCK_N
                offs_n = start_n + tl.arange(0, BLOCK_N)
                mask_n = (offs_n >= key_start) & (offs_n < key_end)
                key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
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
                probs, slopes = tile_powers(scores - threshold[:, None], eps, EPS, QUICK)
                tile_mass = tl.sum(probs, 1)
                word = word | (keeps_bit << bit)
                if tl.max(tile_mass, 0) > 0.0:
                    mass += tile_mass
                    slope += tl.sum(slopes, 1)
                    word = word | (1 << bit)
                    value = load_rows(
                        value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V
                    )
                    if HAS_DROPOUT:
                        entry = (at_row * num_keys)[:, None] + offs_n[None, :]
                        drawn = dropout_keep(entry, tl.load(seed_ptr), keep_bound)
                        probs = tl.where(drawn, probs, 0.0)
                        slopes = tl.where(drawn, slopes, 0.0)
                    output = tl.dot(
                        probs.to(value.dtype),
                        value,
                        output,
                        input_precision="ieee",
                        out_dtype=ACC,
                    )
                    if KEEP:
                        output_slope = tl.dot(
                            slopes.to(value.dtype),
                            value,
                            output_slope,
                            input_precision="ieee",
                            out_dtype=ACC,
                        )
            tl.store(words_ptr + w, word)
        tl.debug_barrier()
        keeps_bit = 0
        step = newton_step(mass, slope, eps, EPS)
        too_far = tl.abs(mass - 1.0) > EXCESS
        moves = tl.abs(step) > ROUNDING * (1.0 + tl.abs(threshold))
        again = tl.max((too_far & moves).to(tl.int32), 0)
        threshold += step

    output_ptr += batch * stride_ob + head * stride_oh
    has_keys = slope != 0.0
    if KEEP:
        direction = output_slope * (keep_scale / tl.where(has_keys, slope, 1.0))[:, None]
        direction_ptr += batch_head * num_queries * VALUE_DIM
        store_rows(direction_ptr, direction, offs_m, in_range, VALUE_DIM, 1, VALUE_DIM, BLOCK_V)
        tl.store(threshold_ptr + at_row, threshold, mask=in_range)
        # The last step folded in: O(t + step) = O - step OU, normalised by what is left of Z.
        output -= step[:, None] * output_slope
        mass -= step * slope
    output = output * (keep_scale / tl.where(has_keys, mass, 1.0))[:, None]
    store_rows(output_ptr, output, offs_m, in_range, stride_ol, stride_od, VALUE_DIM, BLOCK_V)
