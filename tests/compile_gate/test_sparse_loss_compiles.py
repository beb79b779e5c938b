"""Kernels of the losses compile without spills, and to what the table of resources says."""

import pytest
from gate import check_compiles, check_shipped, name_of, sample

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.sparse_loss.compile_cases import compile_cases


@pytest.mark.parametrize(("case", "arch"), sample(compile_cases(), 1), ids=name_of)
def test_compiles_without_spills(case: CompileCase, arch: int) -> None:
    check_shipped(case, arch)


@pytest.mark.parametrize(
    "name", ["merge_top_k", "collect", "gather_scale", "segment_sum"], ids=lambda name: name
)
def test_rows_are_read_16_bytes_at_a_time(name: str) -> None:
    case = next(case for case in compile_cases() if case.name.startswith(f"{name} bf16"))
    assert "ld.global.v4.b32" in check_compiles(case, 90).ptx
