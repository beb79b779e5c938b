"""Row kernels of entmax compile without spills, and to what the table of resources says."""

import pytest
from gate import ARCHITECTURES, check_shipped, name_of, sample

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.entmax.compile_cases import compile_cases

CASES = compile_cases()


@pytest.mark.parametrize(("case", "arch"), sample(CASES, 4), ids=name_of)
def test_compiles_without_spills(case: CompileCase, arch: int) -> None:
    check_shipped(case, arch)


def test_each_kernel_meets_every_dtype_and_every_gpu() -> None:
    turns = sample(CASES, 4)
    for kernel in {case.kernel for case in CASES}:
        mine = [(case, arch) for case, arch in turns if case.kernel is kernel]
        dtypes = {case.types.get("scores_ptr", case.types.get("grad_ptr")) for case, _ in mine}
        assert dtypes == {"*fp32", "*fp16", "*bf16"}
        assert {arch for _, arch in mine} == set(ARCHITECTURES)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
