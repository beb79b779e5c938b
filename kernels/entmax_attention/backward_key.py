"""The gradients of attention that belong to keys: dK and dV."""

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


def key_gradients(
    problem: Problem, want_key: bool, want_value: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dK and dV in the layouts of key and value.

    Four tile products per active tile, three without dK, two without dV. A program adds up all
    query heads that share its key head, so that no two programs write to one place.
    """
    key, value = problem.key, problem.value
    grad_key = torch.empty_like(key) if want_key else None
    grad_value = torch.empty_like(value) if want_value else None
    lists = list_active_tiles(problem.bits, problem.num_key_blocks, by_key=True)

    def run(plan: Plan) -> None:
        blocks = cdiv(key.shape[2], problem.columns(plan))
        _entmax_attention_backward_key_kernel[(key.shape[0] * key.shape[1] * blocks,)](
            **problem.pointers(),
            common_ptr=problem.common,
            tiles_ptr=lists.tiles,
            counts_ptr=lists.counts,
            grad_key_ptr=grad_key,
            grad_value_ptr=grad_value,
            **problem.strides(),
            **named_strides("dk", grad_key),
            **named_strides("dv", grad_value),
            **problem.numbers(),
            **problem.constants(plan),
            TILE_M=problem.blocks.queries,
            HAS_BIAS=problem.bias is not None,
            WANT_KEY=want_key,
            WANT_VALUE=want_value,
            **plan.launch.options(),
        )

    problem.launch("key", problem.plans.key, run)
    return grad_key, grad_value


@triton.jit
def _entmax_attention_backward_key_kernel(
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
    common_ptr,
    tiles_ptr,
    counts_ptr,
    grad_key_ptr,
    grad_value_ptr,
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
    stride_dkb,
    stride_dkh,
    stride_dkl,
    stride_dkd,
    stride_dvb,
    stride_dvh,
    stride_dvl,
    stride_dvd,
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
    WANT_KEY: tl.constexpr,
    WANT_VALUE: tl.constexpr,
    TILE_M: tl.constexpr,
):
    program = tl.program_id(0)
    blocks = tl.cdiv(num_keys, BLOCK_N)
    key_heads = heads // group
    batch = (program // blocks // key_heads).to(tl.int64)
    key_head = (program // blocks % key_heads).to(tl.int64)
    start_n = program % blocks * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)

    rows_ptr += batch * bounds_step * 3 * num_queries
    spans_ptr += batch * bounds_step * 4
    common_ptr += batch * bounds_step * 2 * tl.cdiv(num_queries, TILE_M)
    mask_n = (offs_n >= tl.load(spans_ptr)) & (offs_n < tl.load(spans_ptr + 1))
    live_start, live_end = tl.load(spans_ptr + 2), tl.load(spans_ptr + 3)
    key_ptr += batch * stride_kb + key_head * stride_kh
    key = load_rows(key_ptr, offs_n, mask_n, stride_kl, stride_kd, DIM, BLOCK_D)
    QUICK: tl.constexpr = key.dtype.primitive_bitwidth == 16
    value_ptr += batch * stride_vb + key_head * stride_vh
    value = load_rows(value_ptr, offs_n, mask_n, stride_vl, stride_vd, VALUE_DIM, BLOCK_V)

    seed = 0
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    # Transposed, so that tall products with few keys still fill the tensor cores.
    grad_key = tl.zeros([BLOCK_D, BLOCK_N], ACC)
    grad_value = tl.zeros([BLOCK_V, BLOCK_N], ACC)
    STEPS: tl.constexpr = TILE_M // BLOCK_M
    for head in range(key_head * group, key_head * group + group):
        batch_head = batch * heads + head
        head_query_ptr = query_ptr + batch * stride_qb + head * stride_qh
        head_grad_ptr = grad_output_ptr + batch * stride_gb + head * stride_gh
        eps = 0.0
        if EPS is None:
            eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)
        # Several blocks of keys may share a tile, and so its list.
        list_index = batch_head * tl.cdiv(num_keys, TILE_N) + start_n // TILE_N
        list_ptr = tiles_ptr + list_index * tl.cdiv(num_queries, TILE_M)
        for step in range(tl.load(counts_ptr + list_index) * STEPS):
            query_block = tl.load(list_ptr + step // STEPS).to(tl.int32)
            offs_m = query_block * TILE_M + step % STEPS * BLOCK_M + tl.arange(0, BLOCK_M)
            # Outside of these a query sees no key and may hold anything.
            mask_m = (offs_m >= live_start) & (offs_m < live_end)
            query = load_rows(head_query_ptr, offs_m, mask_m, stride_ql, stride_qd, DIM, BLOCK_D)
            grad = load_rows(
                head_grad_ptr, offs_m, mask_m, stride_gl, stride_gd, VALUE_DIM, BLOCK_V
            )
            at_row = batch_head * num_queries + offs_m
            threshold = tl.load(threshold_ptr + at_row, mask=mask_m, other=float("inf"))
            delta = tl.load(delta_ptr + at_row, mask=mask_m, other=0.0)
            entry = 0
            if HAS_DROPOUT:
                entry = (at_row * num_keys)[:, None]
            head_bias_ptr = bias_ptr
            if HAS_BIAS:
                head_bias_ptr = bias_ptr + head * (num_queries + num_keys - 1)
            common_start = tl.load(common_ptr + 2 * query_block)
            common_end = tl.load(common_ptr + 2 * query_block + 1)
            needs_mask = (start_n < common_start) | (start_n + BLOCK_N > common_end)
            scores = tile_scores(
                query,
                key,
                scale,
                head_bias_ptr,
                rows_ptr,
                offs_m,
                num_queries,
                offs_n,
                num_keys,
                needs_mask,
                HAS_BIAS,
                ACC,
            )
            grad_weights = scores
            if WANT_KEY:
                grad_weights = tl.dot(grad, tl.trans(value), input_precision="ieee", out_dtype=ACC)
            weights, slopes, centred, _ = tile_gradient(
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
                False,
            )
            if WANT_VALUE:
                grad_value = tl.dot(
                    tl.trans(grad),
                    weights.to(grad.dtype),
                    grad_value,
                    input_precision="ieee",
                    out_dtype=ACC,
                )
            if WANT_KEY:
                grad_key = tl.dot(
                    tl.trans(query),
                    (slopes * centred).to(query.dtype),
                    grad_key,
                    input_precision="ieee",
                    out_dtype=ACC,
                )

    in_range = offs_n < num_keys
    if WANT_KEY:
        grad_key_ptr += batch * stride_dkb + key_head * stride_dkh
        store_rows(
            grad_key_ptr,
            tl.trans(grad_key) * scale,
            offs_n,
            in_range,
            stride_dkl,
            stride_dkd,
            DIM,
            BLOCK_D,
        )
    if WANT_VALUE:
        grad_value_ptr += batch * stride_dvb + key_head * stride_dvh
        store_rows(
            grad_value_ptr,
            tl.trans(grad_value) * keep_scale,
            offs_n,
            in_range,
            stride_dvl,
            stride_dvd,
            VALUE_DIM,
            BLOCK_V,
        )
