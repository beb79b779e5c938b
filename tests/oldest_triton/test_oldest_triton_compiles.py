"""The kernels compile for an H100 with the oldest Triton, 16-bit ones with next to no spills."""

from importlib import import_module

import pytest

from sparseformer.kernels.common.compilation import SHARED_LIMITS, CompileCase, compile_kernel

ROOMS = ("entmax", "sparse_loss", "entmax_attention")
ARCH = 90
# Bytes that Triton 3.6 spills at most: in a few kernels of fp32, and else in the one that solves t
# of a decoded row. The table of resources, of Triton 3.9, has none.
SPILLED_FP32, SPILLED = 256, 8


def _cases() -> list[CompileCase]:
    """Return the last configuration of each kernel and dtype: the one with most options."""
    chosen: dict[tuple[str, str], CompileCase] = {}
    for room in ROOMS:
        for case in import_module(f"sparseformer.kernels.{room}.compile_cases").compile_cases():
            dtype = next((x for x in ("fp32", "fp16", "bf16") if x in case.name), "")
            chosen[case.kernel.__name__, dtype] = case
    return list(chosen.values())


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_compiles(case: CompileCase) -> None:
    compiled = compile_kernel(case.kernel, ARCH, case.types, case.constants, case.launch.options())
    assert compiled.shared <= SHARED_LIMITS[ARCH]
    assert compiled.spilled <= (SPILLED_FP32 if "fp32" in case.name else SPILLED)
