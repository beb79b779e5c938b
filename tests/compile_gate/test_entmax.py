"""The row kernels of entmax compile without spills, for every GPU in turn.

Every kernel is compiled with every kind of alpha, for one dtype and one GPU, which take turns so
that each kernel meets every dtype and every GPU.
"""

import pytest
from gate import ARCHITECTURES, check_compiles

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.entmax.compile_cases import compile_cases

CASES = compile_cases()
# Shapes and regimes, forward and backward.
KERNELS = 8


def _turns() -> list[tuple[CompileCase, int]]:
    turns = []
    for index in range(len(CASES) // 3):
        arch = ARCHITECTURES[(3 * index + index // KERNELS) % len(ARCHITECTURES)]
        turns.append((CASES[3 * index + index % 3], arch))
    return turns


@pytest.mark.parametrize(
    ("case", "arch"), _turns(), ids=lambda v: v.name if isinstance(v, CompileCase) else f"sm_{v}"
)
def test_compiles_without_spills(case: CompileCase, arch: int) -> None:
    check_compiles(case, arch)


def test_each_kernel_meets_every_dtype_and_every_gpu() -> None:
    for kernel in range(KERNELS):
        mine = _turns()[kernel::KERNELS]
        dtypes = {case.types.get("scores_ptr", case.types.get("grad_ptr")) for case, _ in mine}
        assert dtypes == {"*fp32", "*fp16", "*bf16"}
        assert {arch for _, arch in mine} == set(ARCHITECTURES)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
