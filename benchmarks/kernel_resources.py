"""Compile every shipped configuration of every kernel for four GPUs, and print what each needs.

    python benchmarks/kernel_resources.py > docs/kernel_resources.md

No GPU is needed. Occupancy is the number of warps of one multiprocessor that registers and shared
memory allow, of 64 (48 on sm_89).
"""

import argparse
from importlib import import_module
from importlib.metadata import version

from sparseformer.kernels.common.compilation import CompileCase, Compiled, compile_kernel

ROOMS = ("entmax", "sparse_loss", "entmax_attention")
ARCHITECTURES = (80, 89, 90, 100)
REGISTERS = 65_536
# Shared memory of one multiprocessor in bytes, and its most warps, by architecture.
SHARED = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472}
MAX_WARPS = {80: 64, 89: 48, 90: 64, 100: 64}


def main() -> None:
    """Print one table per room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, help=f"among {', '.join(ROOMS)}")
    rooms = parser.parse_args().rooms
    print("# Resources of the kernels\n")
    print(
        f"Compiled by triton {version('triton')} without a GPU (`python "
        "benchmarks/kernel_resources.py`): registers per thread, KiB of shared memory per program, "
        "and the warps that fit on a multiprocessor. Nothing spills; `w` marks use of wgmma."
    )
    for room in rooms:
        cases = import_module(f"sparseformer.kernels.{room}.compile_cases").compile_cases()
        print(f"\n## {room}\n")
        print("| kernel | " + " | ".join(f"sm_{arch}" for arch in ARCHITECTURES) + " |")
        print("|---" * (len(ARCHITECTURES) + 1) + "|")
        for case in cases:
            cells = [_cell(case, arch) for arch in ARCHITECTURES]
            print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)


def _cell(case: CompileCase, arch: int) -> str:
    compiled = compile_kernel(case.kernel, arch, case.types, case.constants, case.launch.options())
    spilled = f", SPILLS {compiled.spilled} B" if compiled.spilled else ""
    mark = " w" if "wgmma" in compiled.ptx else ""
    shared = compiled.shared / 1024
    return f"{compiled.registers}, {shared:.0f} KiB, {_warps(compiled, arch)}{mark}{spilled}"


def _warps(compiled: Compiled, arch: int) -> int:
    """Return how many warps of such programs fit on one multiprocessor."""
    # Registers are given out in units of 8 per thread; a program takes 1 KiB of shared memory more.
    per_program = -(-compiled.registers // 8) * 8 * 32 * compiled.num_warps
    by_registers = REGISTERS // per_program
    by_shared = SHARED[arch] // (compiled.shared + 1024)
    programs = min(by_registers, by_shared, MAX_WARPS[arch] // compiled.num_warps)
    return programs * compiled.num_warps


if __name__ == "__main__":
    main()
