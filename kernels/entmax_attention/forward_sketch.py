"""The first pass of attention: t of each query from a sketch of its scores, and the live tiles."""

import triton
import triton.language as tl

from sparseformer.kernels.entmax.device import MIN_EPS
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward_device import (
    key_spans,
    load_bounds,
)
from sparseformer.kernels.entmax_attention.forward_problem import Problem, State
from sparseformer.kernels.entmax_attention.launch_table import Plan
from sparseformer.kernels.entmax_attention.sketch import (
    MAX_SOLVE_STEPS,
    dropped_mass,
    largest_bend,
    move_estimate,
    sketch_insert,
    sketch_sums,
    solve_on_sketch,
    sums_of,
    support_size,
)
from sparseformer.kernels.entmax_attention.tiles import load_rows, tile_scores

# With this share of the first keys in the support, a sketch won't hold that of the whole row.
WIDE: tl.constexpr = tl.constexpr(0.25)
# An estimate of t is taken if it seems this close, in sum p.
MAX_DOUBT: tl.constexpr = tl.constexpr(0.1)


def sketch_thresholds(
    problem: Problem, plan: Plan, rounding: float, blocks: Blocks, state: State
) -> None:
    """Fill the state, with one product per visible tile."""
    strides, constants = problem.strides(), problem.constants()
    _entmax_attention_sketch_kernel[problem.grid(blocks)](
        query_ptr=problem.query,
        key_ptr=problem.key,
        bias_ptr=problem.bias,
        alpha_ptr=problem.alpha,
        rows_ptr=problem.bounds.rows,
        spans_ptr=problem.bounds.spans,
        **state.pointers(),
        **{name: n for name, n in strides.items() if not name.startswith("stride_v")},
        **problem.sizes(),
        scale=problem.scale,
        **{name: constants[name] for name in ("EPS", "DIM", "BLOCK_D", "HAS_BIAS", "ACC")},
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        DEPTH=plan.depth,
        DOUBT=plan.doubt,
        CLOSE=plan.close,
        ROUNDING=rounding,
        **plan.sketch_launch.options(),
    )


@triton.jit
def _entmax_attention_sketch_kernel(
    query_ptr,
    key_ptr,
    bias_ptr,
    alpha_ptr,
    rows_ptr,
    spans_ptr,
    threshold_ptr,
    words_ptr,
    refine_ptr,
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
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    DOUBT: tl.constexpr,
    CLOSE: tl.constexpr,
    ROUNDING: tl.constexpr,
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
    QUICK: tl.constexpr = query.dtype.primitive_bitwidth == 16
    key_ptr += batch * stride_kb + head // group * stride_kh
    if HAS_BIAS:
        bias_ptr += head * (num_queries + num_keys - 1)
    eps = 0.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)
        reach = 1.0 / eps
    else:
        reach = 1.0 / EPS
    at_block = batch_head * blocks + block
    num_words = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), 32)
    words_ptr += at_block * num_words

    # A lower bound of t; -inf as long as no key was seen.
    threshold = tl.full([BLOCK_M], float("-inf"), ACC)
    top1 = tl.full([BLOCK_M, BLOCK_N], float("-inf"), ACC)
    top2, top3, top4 = top1, top1, top1
    # From the diagonal down, then around: near keys often score highest, and the sooner t is high
    # the fewer tiles are flagged in vain. Words are filled from their last bit.
    diagonal = (block * BLOCK_M + BLOCK_M - 1 + num_keys - num_queries) // BLOCK_N
    n = tl.maximum(tl.minimum(diagonal | 31, last_tile - 1), first_tile)
    word = 0
    # Of the keys seen at an estimate of t, which is taken where the support is wide.
    estimate, mass, slope, bend = threshold, threshold, threshold, threshold
    doubt, is_wide = 0.0, 0
    # Tiles until t is solved for the first time: the sketch holds all of them.
    chunk = DEPTH + 0
    tile = first_tile
    while tile < last_tile:
        stop = tl.minimum(tile + chunk, last_tile)
        for _ in range(tile, stop):
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
            row_max = tl.max(scores, 1)
            # t is at least the row's maximum, and a key of the support lies above t - 1 / eps.
            threshold = tl.maximum(threshold, row_max)
            may_hold = row_max > threshold - reach
            flag = tl.max(may_hold.to(tl.int32), 0)
            word = tl.where((n % 32 == 31) | (n == last_tile - 1), 0, word) | (flag << (n % 32))
            tl.store(words_ptr + n // 32, word)
            top1, top2, top3, top4 = sketch_insert(scores, top1, top2, top3, top4, DEPTH)
            if is_wide != 0:
                cap = largest_bend(tl.max(top1, 1), estimate, reach)
                masses, slopes, bends = sums_of(scores - estimate[:, None], cap, eps, EPS, QUICK)
                mass += masses
                slope += slopes
                bend += bends
            n = tl.where(n == first_tile, last_tile - 1, n - 1)
        has_keys = threshold > float("-inf")
        at_least = tl.where(has_keys, threshold, 0.0)
        steps = tl.where(stop < last_tile, 2, MAX_SOLVE_STEPS)
        solved = solve_on_sketch(
            at_least, top1, top2, top3, top4, eps, steps, CLOSE, ROUNDING, EPS, QUICK, DEPTH
        )
        threshold = tl.where(has_keys, solved, float("-inf"))
        weight = (last_tile - first_tile).to(ACC) / (stop - first_tile).to(ACC)
        # Sparsemax has narrow supports, and too rough a border for an estimate.
        if (tile == first_tile) & (stop < last_tile) & (EPS != 1.0):
            support = support_size(solved, top1, top2, top3, top4, reach, DEPTH)
            is_wide = (tl.max(support, 0) > WIDE * DEPTH * BLOCK_N).to(tl.int32)
            if is_wide != 0:
                estimate = solve_on_sketch(
                    solved,
                    top1,
                    top2,
                    top3,
                    top4,
                    eps,
                    4,
                    CLOSE,
                    ROUNDING,
                    EPS,
                    QUICK,
                    DEPTH,
                    weight,
                )
                cap = largest_bend(tl.max(top1, 1), estimate, reach)
                mass, slope, bend = sketch_sums(
                    estimate, cap, top1, top2, top3, top4, eps, EPS, QUICK, DEPTH
                )
        elif is_wide != 0:
            step, slope, more = move_estimate(mass, slope, bend, weight, eps, EPS)
            estimate += step
            mass = tl.full([BLOCK_M], 1.0, ACC) / weight
            doubt += tl.max(tl.where(has_keys, more, 0.0), 0)
        tile = stop
        chunk = chunk * tl.where(is_wide != 0, 2, 4)
    # A row without keys: every score minus t is -inf.
    has_keys = threshold > float("-inf")
    threshold = tl.where(has_keys, threshold, float("inf"))
    dropped = dropped_mass(threshold, top1, top2, top3, top4, eps, reach, EPS, QUICK, DEPTH)
    state = 0
    if is_wide != 0:
        doubts = tl.where(has_keys, doubt, float("inf"))
        is_better = (doubts < dropped) & (doubts < MAX_DOUBT)
        # The largest score stays inside the support, so that a step from there can't get lost.
        estimate = tl.minimum(estimate, tl.max(top1, 1) + reach * (1.0 - 2.0**-12))
        threshold = tl.where(is_better, estimate, threshold)
        dropped = tl.where(is_better, doubts, dropped)
        state = 2 * tl.max(is_better.to(tl.int32), 0)
    state += tl.max((dropped > DOUBT).to(tl.int32), 0)
    tl.store(refine_ptr + at_block, state)
    at_row = batch_head * num_queries + offs_m
    tl.store(threshold_ptr + at_row, threshold, mask=offs_m < num_queries)
    for w in range(0, first_tile // 32):
        tl.store(words_ptr + w, 0)
    for w in range(tl.cdiv(last_tile, 32), num_words):
        tl.store(words_ptr + w, 0)
