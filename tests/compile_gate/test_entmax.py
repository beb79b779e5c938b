"""Row kernels of entmax compile without spills, and to what the table of resources says."""

import pytest
from gate import check_shipped, name_of, sample

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.entmax.compile_cases import compile_cases

CASES = compile_cases()


@pytest.mark.parametrize(("case", "arch"), sample(CASES, 4), ids=name_of)
def test_compiles_without_spills(case: CompileCase, arch: int) -> None:
    check_shipped(case, arch)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
