"""The statistics of attention in Triton: one product per visible tile, after a forward pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, cdiv
from sparseformer.kernels.entmax.device import LN_2, MIN_EPS
from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward_device import (
    key_spans,
    load_bounds,
)
from sparseformer.kernels.entmax_attention.forward_problem import Problem, forward_problem
from sparseformer.kernels.entmax_attention.powers import tile_powers
from sparseformer.kernels.entmax_attention.saved import tile_blocks
from sparseformer.kernels.entmax_attention.stats import TILE, AttentionStats, shares
from sparseformer.kernels.entmax_attention.tiles import load_rows, tile_scores

LAUNCH = Launch(num_warps=4)


def attention_stats(arguments: Arguments, threshold: Tensor) -> AttentionStats:
    """Return the sparsity of a call whose forward pass found `threshold`, [B, Hq, Lq, 1]."""
    problem, blocks = forward_problem(arguments), tile_blocks(arguments)
    batch, heads, num_queries, _ = problem.query.shape
    num_keys = problem.key.shape[2]
    grid = (batch, heads, cdiv(num_queries, blocks.queries), cdiv(num_keys, blocks.keys))
    counts = threshold.new_zeros((*grid[:3], 4))
    tiles = torch.zeros((2, *grid), dtype=torch.int8, device=threshold.device)
    if threshold.numel() and num_keys:
        _count(problem, blocks, threshold, counts, tiles)
    return shares(counts.double().sum((0, 2)).T, *_square_tiles(tiles, blocks))


def _count(
    problem: Problem, blocks: Blocks, threshold: Tensor, counts: Tensor, tiles: Tensor
) -> None:
    unused = ("value_ptr", "seed_ptr")
    pointers = {name: x for name, x in problem.pointers().items() if name not in unused}
    strides = {name: n for name, n in problem.strides().items() if not name.startswith("stride_v")}
    constants = {
        name: problem.constants()[name] for name in ("EPS", "DIM", "BLOCK_D", "HAS_BIAS", "ACC")
    }
    _entmax_attention_stats_kernel[problem.grid(blocks)](
        **pointers,
        threshold_ptr=threshold,
        counts_ptr=counts,
        visible_ptr=tiles[0],
        active_ptr=tiles[1],
        **strides,
        **problem.sizes(),
        scale=problem.scale,
        **constants,
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        **LAUNCH.options(),
    )


def _square_tiles(tiles: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return which TILE x TILE tiles are visible and active, made of smaller ones."""
    rows, columns = TILE // blocks.queries, TILE // blocks.keys
    missing = (-tiles.shape[4] % columns, -tiles.shape[3] % rows)
    padded = torch.nn.functional.pad(tiles, (0, missing[0], 0, missing[1])).bool()
    square = padded.unflatten(4, (-1, columns)).any(5).unflatten(3, (-1, rows)).any(4)
    visible, active = square.unbind(0)
    return visible, active


@triton.jit
def _entmax_attention_stats_kernel(
    query_ptr,
    key_ptr,
    bias_ptr,
    alpha_ptr,
    rows_ptr,
    spans_ptr,
    threshold_ptr,
    counts_ptr,
    visible_ptr,
    active_ptr,
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
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(num_queries, BLOCK_M)
    batch_head = program // blocks
    batch, head = batch_head // heads, batch_head % heads
    offs_m = (program % blocks).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_ptr += batch * bounds_step * 3 * num_queries
    first, end = load_bounds(rows_ptr, offs_m, num_queries, num_keys)
    low, high, all_low, all_high = key_spans(first, end, num_keys)
    spans_ptr += batch * bounds_step * 4
    key_start, key_end = tl.load(spans_ptr), tl.load(spans_ptr + 1)
    eps = 1.0
    if EPS is None:
        eps = tl.maximum(tl.load(alpha_ptr + head) - 1.0, MIN_EPS)

    query_ptr += batch * stride_qb + head * stride_qh
    query = load_rows(query_ptr, offs_m, first < end, stride_ql, stride_qd, DIM, BLOCK_D)
    QUICK: tl.constexpr = query.dtype.primitive_bitwidth == 16
    key_ptr += batch * stride_kb + head // group * stride_kh
    if HAS_BIAS:
        bias_ptr += head * (num_queries + num_keys - 1)
    at_row = batch_head * num_queries + offs_m
    threshold = tl.load(threshold_ptr + at_row, mask=offs_m < num_queries, other=float("inf"))

    tile_base = program * tl.cdiv(num_keys, BLOCK_N)
    pairs = tl.zeros([BLOCK_M], ACC)
    support, entropy = pairs, pairs
    for n in range(low // BLOCK_N, tl.cdiv(high, BLOCK_N)):
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
        probs, _ = tile_powers(scores - threshold[:, None], eps, EPS, QUICK)
        seen = tl.sum((scores > float("-inf")).to(ACC), 1)
        held = tl.sum((probs > 0.0).to(ACC), 1)
        log_probs = tl.log2(tl.where(probs > 0.0, probs, 1.0)) * LN_2
        pairs += seen
        support += held
        entropy -= tl.sum(probs * log_probs, 1)
        tl.store(visible_ptr + tile_base + n, (tl.max(seen, 0) > 0.0).to(tl.int8))
        tl.store(active_ptr + tile_base + n, (tl.max(held, 0) > 0.0).to(tl.int8))
    counts_ptr += program * 4
    tl.store(counts_ptr, tl.sum(pairs, 0))
    tl.store(counts_ptr + 1, tl.sum(support, 0))
    tl.store(counts_ptr + 2, tl.sum((pairs > 0.0).to(ACC), 0))
    tl.store(counts_ptr + 3, tl.sum(entropy, 0))
