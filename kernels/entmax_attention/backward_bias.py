"""The gradient of a relative bias: the sums of dS along its diagonals, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import cdiv
from sparseformer.kernels.entmax.device import MIN_EPS
from sparseformer.kernels.entmax_attention.backward_plans import Plan
from sparseformer.kernels.entmax_attention.backward_problem import Problem
from sparseformer.kernels.entmax_attention.tiles import (
    load_rows,
    tile_bias,
    tile_gradient,
)


def bias_gradient(
    problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Tensor:
    """Return the gradient of relative_bias, [Hq, Lq + Lk - 1], in the dtype of the sums.

    A program adds up the tiles along one diagonal of tiles, where equal places have equal offsets,
    and sums the diagonals of that one tile at its end. Two tile products per active tile, and
    O(B Hq (Lq + Lk)) numbers that torch adds in a fixed order.
    """
    query, key = problem.query, problem.key
    batch, heads, num_queries, _ = query.shape
    rows = problem.blocks.queries
    query_blocks = cdiv(num_queries, rows)
    bounds_q = _segment_bounds(cu_seqlens_q, query)
    bounds_k = _segment_bounds(cu_seqlens_k, key)

    def run(plan: Plan) -> Tensor:
        columns = problem.columns(plan)
        bands = rows // columns + 1
        diagonals = cdiv(key.shape[2], columns) + (query_blocks - 1) * (bands - 1)
        parts = problem.delta.new_empty((batch, heads, diagonals, bands, columns))
        _entmax_attention_backward_bias_kernel[(batch * heads * diagonals,)](
            **problem.pointers(),
            bits_ptr=problem.bits,
            bounds_q_ptr=bounds_q,
            bounds_k_ptr=bounds_k,
            parts_ptr=parts,
            **problem.strides(),
            **problem.numbers(),
            num_segments=bounds_q.numel() - 1,
            num_words=problem.bits.shape[3],
            **problem.constants(plan),
            **plan.launch.options(),
        )
        return parts

    parts = problem.launch("bias", problem.plans.bias, run)
    return _join(parts.sum(0), query_blocks * rows, num_queries, key.shape[2])


def _segment_bounds(cu_seqlens: Tensor | None, rows: Tensor) -> Tensor:
    """Return the borders of the packed segments along L; without packing, 0 and L."""
    if cu_seqlens is None:
        return torch.arange(2, device=rows.device) * rows.shape[2]
    return cu_seqlens.long().contiguous()


def _join(parts: Tensor, padded_queries: int, num_queries: int, num_keys: int) -> Tensor:
    """Add the bands [Hq, diagonals, bands, BLOCK_N] where they share offsets."""
    heads, diagonals, bands, columns = parts.shape
    sums = parts.new_zeros((heads, diagonals + bands - 1, columns))
    for band in range(bands):
        start = bands - 1 - band
        sums[:, start : start + diagonals] += parts[:, :, band]
    first = padded_queries - num_queries + 1
    return sums.flatten(1)[:, first : first + num_queries + num_keys - 1]


@triton.jit
def _is_active(
    bits_ptr,
    first_query,
    first_key,
    num_queries,
    num_keys,
    num_words,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Return whether a block of scores touches an active tile; it may lie across four of them."""
    last_query = tl.minimum(first_query + BLOCK_M, num_queries) - 1
    last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
    top, bottom = first_query // BLOCK_M * num_words, last_query // BLOCK_M * num_words
    left, right = first_key // TILE_N, last_key // TILE_N
    found = tl.load(bits_ptr + top + left // 32) | tl.load(bits_ptr + bottom + left // 32)
    other = tl.load(bits_ptr + top + right // 32) | tl.load(bits_ptr + bottom + right // 32)
    found = (found >> (left % 32)) | (other >> (right % 32))
    return (found & 1) != 0


@triton.jit
def _entmax_attention_backward_bias_kernel(
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
    bits_ptr,
    bounds_q_ptr,
    bounds_k_ptr,
    parts_ptr,
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
    bounds_step,
    heads,
    group,
    num_queries,
    num_keys,
    scale,
    keep_scale,
    keep_bound,
    num_segments,
    num_words,
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
):
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    program = tl.program_id(0)
    query_blocks = tl.cdiv(num_queries, BLOCK_M)
    diagonals = tl.cdiv(num_keys, BLOCK_N) + (query_blocks - 1) * RATIO
    # The tile of query block m has key block diagonal + m RATIO.
    diagonal = program % diagonals - (query_blocks - 1) * RATIO
    batch_head = (program // diagonals).to(tl.int64)
    batch = (program // diagonals // heads).to(tl.int64)
    head = (program // diagonals % heads).to(tl.int64)
    key_head = (program // diagonals % heads // group).to(tl.int64)
    rows_ptr += batch * bounds_step * 3 * num_queries
    spans_ptr += batch * bounds_step * 4
    key_start, key_end = tl.load(spans_ptr), tl.load(spans_ptr + 1)
    bits_ptr += batch_head * query_blocks * num_words
    query_ptr += batch * stride_qb + head * stride_qh
    grad_output_ptr += batch * stride_gb + head * stride_gh
    key_ptr += batch * stride_kb + key_head * stride_kh
    value_ptr += batch * stride_vb + key_head * stride_vh
    bias_ptr += head * (num_queries + num_keys - 1)
    seed = 0
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    eps = 0.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)

    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for segment in range(num_segments):
        q_start = tl.load(bounds_q_ptr + segment).to(tl.int32)
        q_end = tl.load(bounds_q_ptr + segment + 1).to(tl.int32)
        k_start = tl.load(bounds_k_ptr + segment).to(tl.int32)
        k_end = tl.load(bounds_k_ptr + segment + 1).to(tl.int32)
        blocks_left = tl.cdiv(k_end - k_start, BLOCK_N) - diagonal
        top = (tl.maximum(-diagonal, 0) + RATIO - 1) // RATIO
        bottom = tl.minimum(
            tl.cdiv(q_end - q_start, BLOCK_M), (tl.maximum(blocks_left, 0) + RATIO - 1) // RATIO
        )
        for block in range(top, bottom):
            first_query = q_start + block * BLOCK_M
            first_key = k_start + (diagonal + block * RATIO) * BLOCK_N
            if _is_active(
                bits_ptr,
                first_query,
                first_key,
                num_queries,
                num_keys,
                num_words,
                BLOCK_M,
                BLOCK_N,
                TILE_N,
            ):
                offs_m = first_query + tl.arange(0, BLOCK_M)
                offs_n = first_key + tl.arange(0, BLOCK_N)
                row_ptr = rows_ptr + offs_m
                first = tl.load(row_ptr, mask=offs_m < q_end, other=0)
                end = tl.load(row_ptr + num_queries, mask=offs_m < q_end, other=0)
                mask_m = first < end
                mask_n = (offs_n >= key_start) & (offs_n < key_end)
                query = load_rows(query_ptr, offs_m, mask_m, stride_ql, stride_qd, DIM, BLOCK_D)
                key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
                value = load_rows(
                    value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V
                )
                grad = load_rows(
                    grad_output_ptr, offs_m, mask_m, stride_gl, stride_gd, VALUE_DIM, BLOCK_V
                )
                scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=ACC) * scale
                scores += tile_bias(bias_ptr, rows_ptr, offs_m, num_queries, offs_n, num_keys, ACC)
                visible = (offs_n[None, :] >= first[:, None]) & (offs_n[None, :] < end[:, None])
                scores = tl.where(visible, scores, float("-inf"))
                QUICK: tl.constexpr = query.dtype.primitive_bitwidth == 16
                grad_weights = tl.dot(grad, tl.trans(value), input_precision="ieee", out_dtype=ACC)
                at_row = batch_head * num_queries + offs_m
                threshold = tl.load(threshold_ptr + at_row, mask=mask_m, other=float("inf"))
                delta = tl.load(delta_ptr + at_row, mask=mask_m, other=0.0)
                _, slopes, centred, _ = tile_gradient(
                    scores,
                    grad_weights,
                    threshold[:, None],
                    delta[:, None],
                    (at_row * num_keys)[:, None] + offs_n[None, :],
                    seed,
                    keep_bound,
                    keep_scale,
                    eps,
                    EPS,
                    QUICK,
                    HAS_DROPOUT,
                    False,
                )
                total += slopes * centred

    # Row r turns by r places, so that a column holds one offset modulo BLOCK_N.
    turn = tl.arange(0, BLOCK_N)[None, :] + tl.arange(0, BLOCK_M)[:, None]
    turned = tl.gather(total, turn % BLOCK_N, 1)
    parts_ptr += program.to(tl.int64) * (RATIO + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    for band in tl.static_range(RATIO + 1):
        sums = tl.sum(tl.where(turn // BLOCK_N == band, turned, 0.0), 0)
        tl.store(parts_ptr + band * BLOCK_N, sums)
