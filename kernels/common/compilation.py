"""Compile a kernel for a GPU that isn't there, and read what it needs from the machine code."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparseformer.kernels.common.launch import Launch

# Shared memory that one block may use, bytes, by compute capability x 10.
SHARED_LIMITS = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}


class Compiled(NamedTuple):
    """What a compiled kernel needs.

    Attributes:
        registers: per thread.
        spilled: bytes of stack and local memory per thread, 0 if everything fits in registers.
        shared: bytes of shared memory per program.
        ptx: the assembly, for counts of instructions.
        num_warps: warps of one program.
    """

    registers: int
    spilled: int
    shared: int
    ptx: str
    num_warps: int


def compile_kernel(
    kernel: Any,
    arch: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Compiled:
    """Compile a jit function for cuda:arch without a GPU.

    Args:
        kernel: a `triton.jit` function, not interpreted.
        arch: compute capability x 10, such as 90.
        types: each run-time parameter's Triton type, such as "*fp16" or "i32". Pointers count as
            aligned to 16 bytes, and the types "i32:16" and "i64:16" as multiples of 16, as torch's
            tensors and typical strides are at a launch.
        constants: the constexpr parameters, and None for a pointer that isn't given.
        options: num_warps, num_stages and other launch options.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    unknown = set(types) ^ (set(names) - set(constants))
    assert not unknown, f"{kernel.__name__}: wrong or missing parameters {sorted(unknown)}"
    signature = {name: types.get(name, "constexpr").split(":")[0] for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*") or kind.endswith(":16")
    }
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    registers, spilled = _resource_usage(result.asm["cubin"])
    return Compiled(
        registers, spilled, result.metadata.shared, result.asm["ptx"], options["num_warps"]
    )


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", printed)
    assert found, printed
    registers, stack, local = (int(group) for group in found.groups())
    return registers, stack + local


class CompileCase(NamedTuple):
    """One shipped configuration of one kernel, for the compile gate and the table of resources.

    Attributes:
        name: kernel, dtype and options in a few words, unique within its package.
        kernel: the jit function.
        types: of its run-time parameters, as in `compile_kernel`.
        constants: its constexpr parameters.
        launch: warps and stages.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    launch: Launch
