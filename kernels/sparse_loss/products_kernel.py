"""Triton kernels for the products of a sparse [tokens, classes] matrix with dense ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, cdiv, kernel_input, next_power_of_2
from sparseformer.kernels.sparse_loss.device import weighted_row_sum

LAUNCH = Launch(num_warps=4, num_stages=2)
# Rows that a program reads at once, to hide the latency, and most features of a program.
GROUP, MAX_BLOCK_FEATURE = 8, 512


@triton.jit
def _gather_scale_kernel(
    columns_ptr,
    coefficients_ptr,
    weight_ptr,
    out_ptr,
    stride_columns_row,
    stride_columns_slot,
    stride_coefficients_row,
    stride_coefficients_slot,
    stride_weight_class,
    stride_weight_feature,
    num_slots,
    num_features,
    GROUP: tl.constexpr,
    BLOCK_FEATURE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_feature = tl.program_id(1) * BLOCK_FEATURE + tl.arange(0, BLOCK_FEATURE)
    total = weighted_row_sum(
        columns_ptr + row * stride_columns_row,
        coefficients_ptr + row * stride_coefficients_row,
        weight_ptr,
        stride_columns_slot,
        stride_coefficients_slot,
        stride_weight_class,
        stride_weight_feature,
        0,
        num_slots,
        num_features,
        offs_feature,
        GROUP,
        BLOCK_FEATURE,
    )
    tl.store(out_ptr + row * num_features + offs_feature, total, mask=offs_feature < num_features)


@triton.jit
def _segment_sum_kernel(
    rows_ptr,
    values_ptr,
    starts_ptr,
    hidden_ptr,
    out_ptr,
    stride_rows,
    stride_values,
    stride_hidden_row,
    stride_hidden_feature,
    stride_out_class,
    stride_out_feature,
    num_features,
    GROUP: tl.constexpr,
    BLOCK_FEATURE: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + column)
    end = tl.load(starts_ptr + column + 1)
    # Most classes of a large vocabulary have no entry.
    if begin < end:
        offs_feature = tl.program_id(1) * BLOCK_FEATURE + tl.arange(0, BLOCK_FEATURE)
        total = weighted_row_sum(
            rows_ptr,
            values_ptr,
            hidden_ptr,
            stride_rows,
            stride_values,
            stride_hidden_row,
            stride_hidden_feature,
            begin,
            end,
            num_features,
            offs_feature,
            GROUP,
            BLOCK_FEATURE,
        )
        mask = offs_feature < num_features
        place = column * stride_out_class + offs_feature.to(tl.int64) * stride_out_feature
        tl.store(out_ptr + place, tl.load(out_ptr + place, mask=mask, other=0.0) + total, mask=mask)


def _block_feature(num_features: int) -> int:
    return min(max(next_power_of_2(num_features), 16), MAX_BLOCK_FEATURE)


def gather_scale(columns: Tensor, coefficients: Tensor, weight: Tensor) -> Tensor:
    """Return sum_j coefficients[i, j] weight[columns[i, j]], [n, D] in float32.

    Slots with the coefficient 0 or the column -1 add nothing, and their row of `weight` is never
    read. The order of a sum depends on the slots of its own row only.

    Args:
        columns: [n, m] int64 or int32 class ids, -1 for none; any strides.
        coefficients: [n, m] float32, any strides.
        weight: [V, D] float32, float16 or bfloat16, any strides.
    """
    (num_rows, num_slots), num_features = columns.shape, weight.shape[1]
    out = torch.empty(num_rows, num_features, dtype=torch.float32, device=weight.device)
    if out.numel() == 0:
        return out
    weight, block = kernel_input(weight), _block_feature(num_features)
    _gather_scale_kernel[(num_rows, cdiv(num_features, block))](
        columns_ptr=columns,
        coefficients_ptr=coefficients,
        weight_ptr=weight,
        out_ptr=out,
        stride_columns_row=columns.stride(0),
        stride_columns_slot=columns.stride(1),
        stride_coefficients_row=coefficients.stride(0),
        stride_coefficients_slot=coefficients.stride(1),
        stride_weight_class=weight.stride(0),
        stride_weight_feature=weight.stride(1),
        num_slots=num_slots,
        num_features=num_features,
        GROUP=GROUP,
        BLOCK_FEATURE=block,
        **LAUNCH.options(),
    )
    return out


def segment_sum(rows: Tensor, columns: Tensor, values: Tensor, hidden: Tensor, out: Tensor) -> None:
    """Add the sum of values[e] hidden[rows[e]] over the entries e of each class to its row of out.

    Entries with the value 0, the column -1 or the column V add nothing and are never read, so
    padded entries needn't be taken out, which would wait for the device. Each class is summed in
    float32 in the order of its entries by programs of its own, so equal input gives equal output.
    For the column sums alone pass `hidden.new_ones(1, 1).expand(n, 1)` and `out[:, None]`.

    Args:
        rows: [e] int32 or int64, tokens.
        columns: [e] int32 or int64, ascending: class ids.
        values: [e] float32.
        hidden: [n, D] float32, float16 or bfloat16, any strides.
        out: [V, D] float32, any strides.
    """
    num_classes, num_features = out.shape
    assert out.dtype == torch.float32, out.dtype
    if rows.numel() == 0 or out.numel() == 0:
        return
    classes = torch.arange(num_classes + 1, dtype=columns.dtype, device=columns.device)
    # Programs of all classes, most of which end at once: their number is known on the host.
    starts = torch.searchsorted(columns.contiguous(), classes)
    hidden, block = kernel_input(hidden), _block_feature(num_features)
    _segment_sum_kernel[(num_classes, cdiv(num_features, block))](
        rows_ptr=rows,
        values_ptr=values,
        starts_ptr=starts,
        hidden_ptr=hidden,
        out_ptr=out,
        stride_rows=rows.stride(0),
        stride_values=values.stride(0),
        stride_hidden_row=hidden.stride(0),
        stride_hidden_feature=hidden.stride(1),
        stride_out_class=out.stride(0),
        stride_out_feature=out.stride(1),
        num_features=num_features,
        GROUP=GROUP,
        BLOCK_FEATURE=block,
        **LAUNCH.options(),
    )
