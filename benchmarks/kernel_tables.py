"""The page docs/kernel_resources.md, from the results of benchmarks/kernel_resources.py."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sparseformer.kernels.common.compilation import SHARED_LIMITS
from sparseformer.kernels.common.launch import REGISTERS

Results = Mapping[str, Mapping[str, Any]]

ARCHITECTURES = {80: "A100", 89: "L4, RTX 4090", 90: "H100, H200", 100: "B200"}
# Of one multiprocessor: bytes of shared memory, most warps, most programs (CUDA C++ Programming
# Guide, table of technical specifications by compute capability).
MULTIPROCESSOR = {
    80: (167_936, 64, 32),
    89: (102_400, 48, 24),
    90: (233_472, 64, 32),
    100: (233_472, 64, 32),
}
# Shared memory that the system takes of each program.
RESERVED = 1024

INTRODUCTION = """\
# Resources of the kernels

Written by `python benchmarks/kernel_resources.py`, which compiles every shipped configuration
with triton {triton} and needs no GPU; docs/kernel_resources.json has each of the {cases} by itself.
A line sums up the configurations of one kernel and dtype (widths, alpha fixed or learned, bias and
dropout): registers of a thread (fewest - most), KiB of shared memory of a program (most), and the
warps that a multiprocessor holds at once (fewest - most). {spills} Tiles are multiplied by `wgmma`
on sm_90 where the last column says so; fp32 products don't use tensor cores, because those would
round the inputs. The plans `by warp groups` replace the others on GPUs that have those.
"""


def page(results: Results, triton: str) -> str:
    """Return the page as Markdown."""
    spills = spilling(results)
    told = f"These spill: {', '.join(spills)}." if spills else "No kernel spills."
    lines = [INTRODUCTION.format(triton=triton, cases=len(results), spills=told)]
    rooms: dict[str, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for name, entry in results.items():
        room, case = name.split("/", 1)
        rooms.setdefault(room, defaultdict(list))[_group(case)].append(entry)
    for room, groups in rooms.items():
        lines += [f"## {room}\n", _header(), "|---" * (len(ARCHITECTURES) + 4) + "|"]
        lines += [_line(*group, entries) for group, entries in groups.items()]
        lines.append("")
    return "\n".join(lines)


def spilling(results: Results) -> list[str]:
    """Return the configurations that keep something in memory that should be in registers."""
    names = [str(arch) for arch in ARCHITECTURES]
    known = {name: [x[arch] for arch in names if arch in x] for name, x in results.items()}
    return [name for name, mine in known.items() if any(x["spilled"] for x in mine)]


def _group(case: str) -> tuple[str, str]:
    """Split a case into what comes before its dtype, and the dtype."""
    found = re.search(r"^(.*?) (fp32|fp16|bf16)\b", case)
    return (found[1], found[2]) if found else (case, "")


def _header() -> str:
    cards = " | ".join(f"sm_{arch} ({card})" for arch, card in ARCHITECTURES.items())
    return f"| kernel | dtype | cases | {cards} | products |"


def _line(kernel: str, dtype: str, entries: list[Mapping[str, Any]]) -> str:
    cells = " | ".join(_cell(entries, arch) for arch in ARCHITECTURES)
    used = {"wgmma" if entry["90"]["products"] == "wgmma" else "-" for entry in entries}
    return f"| {kernel} | {dtype} | {len(entries)} | {cells} | {' and '.join(sorted(used))} |"


def _cell(entries: list[Mapping[str, Any]], arch: int) -> str:
    mine = [(entry[str(arch)], entry["warps"]) for entry in entries if str(arch) in entry]
    if not mine:
        return "not used"
    registers = _span([x["registers"] for x, _ in mine])
    shared = max(x["shared"] for x, _ in mine)
    assert shared <= SHARED_LIMITS[arch], f"{shared} bytes of shared memory on sm_{arch}"
    warps = _span([occupancy(x["registers"], x["shared"], n, arch) for x, n in mine])
    return f"{registers}, {shared / 1024:.0f} KiB, {warps}"


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} - {high}"


def occupancy(registers: int, shared: int, num_warps: int, arch: int) -> int:
    """Return how many warps of such programs fit on one multiprocessor.

    Args:
        registers: of a thread; a warp gets them in units of 256, from one of four register files.
        shared: bytes of a program.
        num_warps: of a program.
        arch: compute capability x 10.
    """
    memory, most_warps, most_programs = MULTIPROCESSOR[arch]
    by_registers = REGISTERS // 4 // (-(-registers // 8) * 256) * 4 // num_warps
    by_shared = memory // (shared + RESERVED)
    return min(by_registers, by_shared, most_warps // num_warps, most_programs) * num_warps
