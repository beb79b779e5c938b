"""The gradients of attention that belong to queries: dQ, and d alpha of each head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import cdiv
from sparseformer.kernels.entmax.device import MIN_EPS
from sparseformer.kernels.entmax_attention.backward_plans import Plan
from sparseformer.kernels.entmax_attention.backward_problem import Problem, named_strides
from sparseformer.kernels.entmax_attention.tile_lists import list_active_tiles
from sparseformer.kernels.entmax_attention.tiles import (
    load_rows,
    store_rows,
    tile_gradient,
    tile_scores,
)


def query_gradients(
    problem: Problem, want_query: bool, want_alpha: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dQ, in the layout of query, and d alpha [Hq] in the dtype of alpha.

    Three tile products per active tile, two without dQ. Each program leaves one number of
    d alpha, and their sum has a fixed order.
    """
    query = problem.query
    batch, heads, num_queries, _ = query.shape
    blocks = cdiv(num_queries, problem.blocks.queries)
    lists = list_active_tiles(problem.bits, problem.num_key_blocks, by_key=False)
    grad_query = torch.empty_like(query) if want_query else None
    parts = problem.delta.new_empty((batch, heads, blocks)) if want_alpha else None

    def run(plan: Plan) -> None:
        _entmax_attention_backward_query_kernel[(batch * heads * blocks,)](
            **problem.pointers(),
            tiles_ptr=lists.tiles,
            counts_ptr=lists.counts,
            grad_query_ptr=grad_query,
            grad_alpha_ptr=parts,
            **problem.strides(),
            **named_strides("dq", grad_query),
            **problem.numbers(),
            **problem.constants(plan),
            HAS_BIAS=problem.bias is not None,
            WANT_QUERY=want_query,
            WANT_ALPHA=want_alpha,
            **plan.launch.options(),
        )

    problem.launch("query", problem.plans.query, run)
    return grad_query, None if parts is None else parts.sum((0, 2))


@triton.jit
def _entmax_attention_backward_query_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_output_ptr,
    bias_ptr,
    alpha_ptr,
    threshold_ptr,
    delta_ptr,
    rows_ptr,
    spans_ptr,
    seed_ptr,
    tiles_ptr,
    counts_ptr,
    grad_query_ptr,
    grad_alpha_ptr,
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
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dqb,
    stride_dqh,
    stride_dql,
    stride_dqd,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WANT_QUERY: tl.constexpr,
    WANT_ALPHA: tl.constexpr,
):
    program = tl.program_id(0)
    blocks = tl.cdiv(num_queries, BLOCK_M)
    offs_m = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    batch_head = (program // blocks).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    head = (program // blocks % heads).to(tl.int64)
    key_head = (program // blocks % heads // group).to(tl.int64)

    rows_ptr += batch * bounds_step * 3 * num_queries
    row_ptr = rows_ptr + offs_m
    in_range = offs_m < num_queries
    first = tl.load(row_ptr, mask=in_range, other=0)
    end = tl.load(row_ptr + num_queries, mask=in_range, other=0)
    # A query that sees no key may hold anything, and so may a key in the padding.
    mask_m = first < end
    spans_ptr += batch * bounds_step * 4
    key_start, key_end = tl.load(spans_ptr), tl.load(spans_ptr + 1)
    common_start = tl.max(first, 0)
    common_end = tl.min(tl.where(in_range, end, num_keys), 0)
    threshold = tl.load(
        threshold_ptr + batch_head * num_queries + offs_m, mask=mask_m, other=float("inf")
    )
    delta = tl.load(delta_ptr + batch_head * num_queries + offs_m, mask=mask_m, other=0.0)
    if HAS_BIAS:
        bias_ptr += head * (num_queries + num_keys - 1)
    entry, seed = 0, 0
    if HAS_DROPOUT:
        entry = ((batch_head * num_queries + offs_m) * num_keys)[:, None]
        seed = tl.load(seed_ptr)
    eps = 0.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)

    query_ptr += batch * stride_qb + head * stride_qh
    query = load_rows(query_ptr, offs_m, mask_m, stride_ql, stride_qd, DIM, BLOCK_D)
    grad_output_ptr += batch * stride_gb + head * stride_gh
    grad = load_rows(grad_output_ptr, offs_m, mask_m, stride_gl, stride_gd, VALUE_DIM, BLOCK_V)
    QUICK: tl.constexpr = query.dtype.primitive_bitwidth == 16
    key_ptr += batch * stride_kb + key_head * stride_kh
    value_ptr += batch * stride_vb + key_head * stride_vh

    grad_query = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    alpha_sum = tl.zeros([BLOCK_M], ACC)
    term_sum = tl.zeros([BLOCK_M], ACC)
    slope_sum = tl.zeros([BLOCK_M], ACC)
    residue = tl.zeros([BLOCK_M], ACC)
    STEPS: tl.constexpr = TILE_N // BLOCK_N
    tiles_ptr += program.to(tl.int64) * tl.cdiv(num_keys, TILE_N)
    for step in range(tl.load(counts_ptr + program) * STEPS):
        start_n = tl.load(tiles_ptr + step // STEPS).to(tl.int32) * TILE_N + step % STEPS * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = (offs_n >= key_start) & (offs_n < key_end)
        key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
        value = load_rows(value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V)
        needs_mask = (start_n < common_start) | (start_n + BLOCK_N > common_end)
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
        grad_weights = tl.dot(grad, tl.trans(value), input_precision="ieee", out_dtype=ACC)
        _, slopes, centred, term = tile_gradient(
            scores,
            grad_weights,
            threshold[:, None],
            delta[:, None],
            entry + offs_n[None, :],
            seed,
            keep_bound,
            keep_scale,
            eps,
            EPS,
            QUICK,
            HAS_DROPOUT,
            WANT_ALPHA,
        )
        grad_scores = slopes * centred
        if WANT_QUERY:
            grad_query = tl.dot(
                grad_scores.to(key.dtype), key, grad_query, input_precision="ieee", out_dtype=ACC
            )
        if WANT_ALPHA:
            alpha_sum += tl.sum(term * centred, 1)
            term_sum += tl.sum(term, 1)
            slope_sum += tl.sum(slopes, 1)
            residue += tl.sum(grad_scores, 1)

    if WANT_QUERY:
        grad_query_ptr += batch * stride_dqb + head * stride_dqh
        store_rows(
            grad_query_ptr,
            grad_query * scale,
            offs_m,
            in_range,
            stride_dql,
            stride_dqd,
            DIM,
            BLOCK_D,
        )
    if WANT_ALPHA:
        # The dS of a row sum to 0, so their sum tells by how much rounding moved delta.
        moved = residue / tl.where(slope_sum > 0.0, slope_sum, 1.0)
        total = tl.sum(alpha_sum - moved * term_sum, 0)
        tl.store(grad_alpha_ptr + program, total / (eps * eps))
