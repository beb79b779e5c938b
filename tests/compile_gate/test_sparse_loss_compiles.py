"""Every shipped configuration of the loss kernels compiles for every GPU, without spills."""

import pytest
from gate import ARCHITECTURES, check_compiles

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.sparse_loss.compile_cases import compile_cases


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("case", compile_cases(), ids=lambda case: case.name)
def test_compiles(case: CompileCase, arch: int) -> None:
    check_compiles(case, arch)


@pytest.mark.parametrize(
    "name", ["merge_top_k", "collect", "gather_scale", "segment_sum"], ids=lambda name: name
)
def test_rows_are_read_16_bytes_at_a_time(name: str) -> None:
    case = next(case for case in compile_cases() if case.name.startswith(f"{name} bf16"))
    assert "ld.global.v4.b32" in check_compiles(case, 90).ptx
