"""The shipped configurations of the loss kernels, for the compile gate."""

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.sparse_loss import candidates_kernel, products_kernel, topk_kernel

DTYPES = ("fp32", "fp16", "bf16")


def compile_cases() -> list[CompileCase]:
    """Return every kernel by dtype and block size; longer lists of the top k in fp32 only.

    There a half-precision dtype changes the load, and nothing else.
    """
    cases = [_merge_top_k(dtype, 64) for dtype in DTYPES] + [_merge_top_k("fp32", 256)]
    cases += [_collect(dtype, False) for dtype in DTYPES] + [_collect("fp32", True)]
    products = [(dtype, products_kernel.MAX_BLOCK_FEATURE) for dtype in DTYPES] + [("fp32", 16)]
    cases += [_gather_scale(*product) for product in products]
    return cases + [_segment_sum(*product) for product in products]


def _merge_top_k(dtype: str, width: int) -> CompileCase:
    types = {
        "scores_ptr": f"*{dtype}",
        "kept_ptr": "*fp32",
        "columns_ptr": "*i64",
        "new_kept_ptr": "*fp32",
        "new_columns_ptr": "*i64",
        "stride_scores_row": "i32:16",
        "stride_kept_row": "i32:16",
        "stride_columns_row": "i32:16",
        "num_classes": "i32:16",
        "k": "i32:16",
        "first_class": "i32",
    }
    constants = {
        "stride_scores_class": 1,
        "stride_kept_slot": 1,
        "stride_columns_slot": 1,
        "LOG_WIDTH": width.bit_length() - 1,
        "GROUPS": topk_kernel.GROUPS[width],
    }
    name = f"merge_top_k {dtype} {width}"
    kernel = topk_kernel._merge_top_k_kernel
    return CompileCase(name, kernel, types, constants, topk_kernel.LAUNCH)


def _collect(dtype: str, has_reach_ptr: bool) -> CompileCase:
    types = {
        "scores_ptr": f"*{dtype}",
        "top_ptr": "*fp32",
        "values_ptr": "*fp32",
        "columns_ptr": "*i64",
        "counts_ptr": "*i32",
        "stride_scores_row": "i32:16",
        "num_classes": "i32:16",
        "first_class": "i32",
        "capacity": "i32:16",
        "reach": "fp32",
    }
    constants: dict[str, int | None] = {
        "stride_scores_class": 1,
        "HAS_REACH_PTR": has_reach_ptr,
        "BLOCK": candidates_kernel.BLOCK_CLASSES,
    }
    if has_reach_ptr:
        types["reach_ptr"] = "*fp32"
    else:
        constants["reach_ptr"] = None
    name = f"collect {dtype}{' reach of each row' if has_reach_ptr else ''}"
    return CompileCase(
        name, candidates_kernel._collect_kernel, types, constants, candidates_kernel.LAUNCH
    )


def _gather_scale(dtype: str, block: int) -> CompileCase:
    types = {
        "columns_ptr": "*i64",
        "coefficients_ptr": "*fp32",
        "weight_ptr": f"*{dtype}",
        "out_ptr": "*fp32",
        "stride_columns_row": "i32",
        "stride_coefficients_row": "i32",
        "stride_weight_class": "i32:16",
        "num_slots": "i32",
        "num_features": "i32:16",
    }
    constants = {
        "stride_columns_slot": 1,
        "stride_coefficients_slot": 1,
        "stride_weight_feature": 1,
        "GROUP": products_kernel.GROUP,
        "BLOCK_FEATURE": block,
    }
    kernel = products_kernel._gather_scale_kernel
    name = f"gather_scale {dtype} {block}"
    return CompileCase(name, kernel, types, constants, products_kernel.LAUNCH)


def _segment_sum(dtype: str, block: int) -> CompileCase:
    types = {
        "rows_ptr": "*i64",
        "values_ptr": "*fp32",
        "starts_ptr": "*i64",
        "hidden_ptr": f"*{dtype}",
        "out_ptr": "*fp32",
        "stride_hidden_row": "i32:16",
        "stride_out_class": "i32:16",
        "num_features": "i32:16",
    }
    constants = {
        "stride_rows": 1,
        "stride_values": 1,
        "stride_hidden_feature": 1,
        "stride_out_feature": 1,
        "GROUP": products_kernel.GROUP,
        "BLOCK_FEATURE": block,
    }
    kernel = products_kernel._segment_sum_kernel
    name = f"segment_sum {dtype} {block}"
    return CompileCase(name, kernel, types, constants, products_kernel.LAUNCH)
