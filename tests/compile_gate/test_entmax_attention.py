"""Every shipped configuration of the attention kernels compiles without spills, for a GPU in turn.

Each is compiled for one of the GPUs, which take turns so that every kernel meets all of them;
`benchmarks/kernel_resources.py` compiles each for all.
"""

from collections import defaultdict

import pytest
from gate import ARCHITECTURES, check_compiles

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.entmax_attention.compile_cases import compile_cases

CASES = compile_cases()


def _turns() -> list[tuple[CompileCase, int]]:
    met: dict[str, int] = defaultdict(int)
    turns = []
    for case in CASES:
        kernel = case.kernel.__name__
        turns.append((case, ARCHITECTURES[met[kernel] % len(ARCHITECTURES)]))
        met[kernel] += 1
    return turns


@pytest.mark.parametrize(
    ("case", "arch"), _turns(), ids=lambda v: v.name if isinstance(v, CompileCase) else f"sm_{v}"
)
def test_compiles_without_spills(case: CompileCase, arch: int) -> None:
    check_compiles(case, arch)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
