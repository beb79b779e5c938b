"""The gate that every shipped kernel passes on every supported GPU, none of which is needed.

benchmarks/kernel_resources.py compiles all of them for all GPUs and keeps what they need; tests
compile a sample again and hold it to that.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import triton

from sparseformer.kernels.common.compilation import (
    SHARED_LIMITS,
    CompileCase,
    Compiled,
    compile_kernel,
)

ARCHITECTURES = (80, 89, 90, 100)
TABLE = json.loads((Path(__file__).parents[2] / "docs/kernel_resources.json").read_text())


def sample(cases: Iterable[CompileCase], step: int) -> list[tuple[CompileCase, int]]:
    """Return every `step`-th configuration of each kernel, and a GPU; the GPUs take turns."""
    met: dict[str, int] = defaultdict(int)
    chosen = []
    for case in cases:
        kernel = case.kernel.__name__
        turn, skipped = divmod(met[kernel], step)
        if not skipped:
            chosen.append((case, ARCHITECTURES[turn % len(ARCHITECTURES)]))
        met[kernel] += 1
    return chosen


def name_of(value: CompileCase | int) -> str:
    """Return the id of a parameter of a test."""
    return value.name if isinstance(value, CompileCase) else f"sm_{value}"


def check_shipped(case: CompileCase, arch: int) -> Compiled:
    """Compile a shipped configuration, and hold it to the table of what all of them need."""
    compiled = check_compiles(case, arch)
    room = case.kernel.__module__.split(".")[-2]
    entry = TABLE[f"{room}/{case.name}"]
    if entry["triton"] == triton.__version__:
        needs = {"registers": compiled.registers, "spilled": 0, "shared": compiled.shared}
        assert needs.items() <= entry[str(arch)].items()
    return compiled


def check_compiles(case: CompileCase, arch: int) -> Compiled:
    """Compile a case and hold it to no spills and to the card's shared memory."""
    compiled = compile_kernel(case.kernel, arch, case.types, case.constants, case.launch.options())
    assert compiled.spilled == 0, f"{case.name} spills {compiled.spilled} bytes on sm_{arch}"
    limit = SHARED_LIMITS[arch]
    assert compiled.shared <= limit, (
        f"{case.name} needs {compiled.shared} bytes of shared memory, sm_{arch} has {limit}"
    )
    return compiled
