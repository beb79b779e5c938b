"""The backward pass of attention in Triton: delta of each row, then the wanted gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import (
    Launch,
    cdiv,
    kernel_input,
    multiplies_by_warp_groups,
)
from sparseformer.kernels.entmax_attention.arguments import Arguments, Gradients, Saved, Wanted
from sparseformer.kernels.entmax_attention.backward_bias import bias_gradient
from sparseformer.kernels.entmax_attention.backward_key import key_gradients
from sparseformer.kernels.entmax_attention.backward_plans import plans_for
from sparseformer.kernels.entmax_attention.backward_problem import (
    Problem,
    named_strides,
    split_alpha,
)
from sparseformer.kernels.entmax_attention.backward_query import query_gradients
from sparseformer.kernels.entmax_attention.blocks import Blocks, blocks_for, padded_dim
from sparseformer.kernels.entmax_attention.launch_table import launch_case
from sparseformer.kernels.entmax_attention.row_bounds import (
    RowBounds,
    common_keys,
    row_bounds,
)
from sparseformer.kernels.entmax_attention.saved import input_dtype
from sparseformer.kernels.entmax_attention.tiles import load_rows

DELTA_ROWS = 64


def attention_backward(
    arguments: Arguments,
    saved: Saved,
    grad_output: Tensor,
    wanted: Wanted,
    blocks: Blocks | None = None,
) -> Gradients:
    """Return the gradients that are wanted, each in the dtype and layout of its tensor.

    With C = dP - delta: dS = u C, dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q, d alpha =
    sum p g C, and the gradient of the bias is the sum of dS along each diagonal. Only tiles that
    hold a probability above 0 are visited, in a fixed order, so the result repeats bit for bit.

    Args:
        arguments: of the forward pass; mapping is "entmax".
        saved: rows is t [B, Hq, Lq, 1], inf for a query without keys; direction sum u v / sum u,
            where dropout zeroes and scales in the upper sum as in the output, 0 for such a query;
            tiles the words of active tiles, [B, Hq, query blocks, words].
        grad_output: [B, Hq, Lq, Dv], any strides.
        wanted: which gradients to compute.
        blocks: the tile that `saved.tiles` stands for; else that of blocks_for.
    """
    inputs = arguments.differentiable()
    if not grad_output.numel() or not arguments.key.numel():
        return _zeros(inputs, wanted)
    problem = _problem(arguments, saved, grad_output, blocks)
    grad_query = grad_key = grad_value = grad_alpha = grad_bias = None
    if wanted.query or wanted.alpha:
        grad_query, grad_alpha = query_gradients(problem, wanted.query, wanted.alpha)
    if wanted.key or wanted.value:
        grad_key, grad_value = key_gradients(problem, wanted.key, wanted.value)
    if wanted.relative_bias:
        grad_bias = bias_gradient(problem, arguments.cu_seqlens_q, arguments.cu_seqlens_k)
    grads = (grad_query, grad_key, grad_value, grad_alpha, grad_bias)
    pairs = zip(grads, inputs, strict=True)
    return Gradients(*(None if g is None or x is None else g.to(x.dtype) for g, x in pairs))


def _zeros(inputs: tuple[Tensor | None, ...], wanted: Wanted) -> Gradients:
    pairs = zip(inputs, wanted, strict=True)
    return Gradients(*(torch.zeros_like(x) if x is not None and w else None for x, w in pairs))


def _problem(
    arguments: Arguments, saved: Saved, grad_output: Tensor, blocks: Blocks | None
) -> Problem:
    dtype, bias = input_dtype(arguments), arguments.relative_bias
    query, key, value, grad_output = (
        kernel_input(x.to(dtype)) for x in (*arguments[:3], grad_output)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    alpha, eps = split_alpha(arguments, wide)
    bounds = row_bounds(arguments)
    blocks = blocks or blocks_for(dtype, query.shape[3], value.shape[3])
    has_extras = bias is not None or arguments.dropout_p > 0.0
    return Problem(
        query=query,
        key=key,
        value=value,
        grad_output=grad_output,
        bias=None if bias is None else kernel_input(bias).contiguous(),
        alpha=alpha,
        eps=eps,
        threshold=saved.rows.contiguous(),
        delta=_row_deltas(grad_output, kernel_input(saved.direction), bounds, wide),
        bits=saved.tiles.contiguous(),
        bounds=bounds,
        common=common_keys(bounds, blocks.queries),
        seed=arguments.seed if arguments.dropout_p else None,
        dropout_p=arguments.dropout_p,
        scale=arguments.scale,
        blocks=blocks,
        plans=plans_for(
            dtype,
            query.shape[3],
            value.shape[3],
            eps,
            has_extras,
            multiplies_by_warp_groups(query.device),
        ),
        case=launch_case(arguments),
    )


def _row_deltas(
    grad_output: Tensor, direction: Tensor, bounds: RowBounds, dtype: torch.dtype
) -> Tensor:
    """Return delta = dO . direction of each query, [B, Hq, Lq], 0 for one that sees no key."""
    batch, heads, num_queries, value_dim = grad_output.shape
    delta = grad_output.new_empty((batch, heads, num_queries), dtype=dtype)
    _row_deltas_kernel[(batch * heads * cdiv(num_queries, DELTA_ROWS),)](
        grad_output_ptr=grad_output,
        direction_ptr=direction,
        rows_ptr=bounds.rows,
        delta_ptr=delta,
        **named_strides("g", grad_output),
        **named_strides("d", direction),
        bounds_step=bounds.batch_stride(),
        heads=heads,
        num_queries=num_queries,
        VALUE_DIM=value_dim,
        BLOCK_M=DELTA_ROWS,
        BLOCK_V=padded_dim(value_dim),
        **Launch().options(),
    )
    return delta


@triton.jit
def _row_deltas_kernel(
    grad_output_ptr,
    direction_ptr,
    rows_ptr,
    delta_ptr,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_db,
    stride_dh,
    stride_dl,
    stride_dd,
    bounds_step,
    heads,
    num_queries,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    program = tl.program_id(0)
    blocks = tl.cdiv(num_queries, BLOCK_M)
    offs_m = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    batch_head = (program // blocks).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    head = (program // blocks % heads).to(tl.int64)
    in_range = offs_m < num_queries
    row_ptr = rows_ptr + batch * bounds_step * 3 * num_queries + offs_m
    first = tl.load(row_ptr, mask=in_range, other=0)
    end = tl.load(row_ptr + num_queries, mask=in_range, other=0)
    mask_m = first < end
    grad_output_ptr += batch * stride_gb + head * stride_gh
    grad = load_rows(grad_output_ptr, offs_m, mask_m, stride_gl, stride_gd, VALUE_DIM, BLOCK_V)
    direction_ptr += batch * stride_db + head * stride_dh
    direction = load_rows(direction_ptr, offs_m, mask_m, stride_dl, stride_dd, VALUE_DIM, BLOCK_V)
    dtype = delta_ptr.dtype.element_ty
    delta = tl.sum(grad.to(dtype) * direction.to(dtype), 1)
    tl.store(delta_ptr + batch_head * num_queries + offs_m, delta, mask=in_range)
