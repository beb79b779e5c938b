"""Attention kernels compile without spills, and to what the table of resources says."""

import pytest
from gate import check_compiles, check_shipped, name_of, sample

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.entmax_attention.compile_cases import compile_cases

CASES = compile_cases()


@pytest.mark.parametrize(("case", "arch"), sample(CASES, 2), ids=name_of)
def test_compiles_without_spills(case: CompileCase, arch: int) -> None:
    check_shipped(case, arch)


@pytest.mark.parametrize("kernel", ["forward output", "backward query", "backward key"])
def test_learned_alpha_takes_the_logarithm_of_the_gpu_for_16_bits_alone(kernel: str) -> None:
    """That of fp32 keeps more digits, at about twice the instructions of the whole loop."""
    cases = {case.name: case for case in CASES}
    options = "" if kernel == "forward output" else " bias dropout"
    narrow, wide = (cases[f"{kernel} {dtype} D=64 eps=None{options}"] for dtype in ("bf16", "fp32"))
    assert "lg2.approx.ftz.f32" in check_compiles(narrow, 90).ptx
    assert "lg2.approx" not in check_compiles(wide, 90).ptx


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
