"""Compile every shipped configuration of every kernel for four GPUs, and write what each needs.

    python benchmarks/kernel_resources.py [--jobs N] [ROOM ...]

No GPU is needed. docs/kernel_resources.json keeps one line for each configuration with a hash of
what it was compiled from, so that a second run compiles only what has changed since;
docs/kernel_resources.md is the summary. A test holds the lines to the kernels as they are. All of
it takes about 45 minutes on one core. Fails if a kernel spills.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import kernel_tables
from kernel_sources import fingerprint

from sparseformer.kernels.common.compilation import CompileCase, compile_kernel
from sparseformer.kernels.entmax_attention.backward_cases import warp_group_cases

ROOMS = ("entmax", "sparse_loss", "entmax_attention")
ARCHITECTURES = tuple(kernel_tables.ARCHITECTURES)
WITH_WARP_GROUPS = (90, 100)
DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, TABLE = DOCS / "kernel_resources.json", DOCS / "kernel_resources.md"
# Of the assembly, the first that occurs: how tiles are multiplied.
PRODUCTS = ("tcgen05.mma", "wgmma", "mma.sync")

Results = dict[str, dict[str, Any]]


class Shipped(NamedTuple):
    """A configuration and the GPUs that it is for."""

    case: CompileCase
    architectures: tuple[int, ...]


class Job(NamedTuple):
    """A configuration, by its place in the list of its package, and a GPU."""

    room: str
    index: int
    arch: int


def main() -> int:
    """Compile what has changed and write both files; return 1 if anything spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, help=f"among {', '.join(ROOMS)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    arguments = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: x for name, x in kept.items() if name.split("/")[0] not in arguments.rooms}
    jobs = []
    for room in arguments.rooms:
        for index, (case, architectures) in enumerate(shipped_cases(room)):
            entry = _up_to_date(kept.get(f"{room}/{case.name}"), case)
            results[f"{room}/{case.name}"] = entry
            jobs += [Job(room, index, arch) for arch in architectures if str(arch) not in entry]
    print(f"{len(jobs)} kernels to compile", file=sys.stderr, flush=True)
    for done, (job, measured) in enumerate(_compiled(jobs, arguments.jobs)):
        name = f"{job.room}/{shipped_cases(job.room)[job.index].case.name}"
        results[name][str(job.arch)] = measured
        if done % 16 == 15 or done == len(jobs) - 1:
            _save(results)
            print(f"{done + 1} of {len(jobs)}: {name}", file=sys.stderr, flush=True)
    _save(results)
    TABLE.write_text(kernel_tables.page(results, version("triton")))
    spilled = kernel_tables.spilling(results)
    for name in spilled:
        print(f"{name} spills", file=sys.stderr)
    return 1 if spilled else 0


@cache
def shipped_cases(room: str) -> list[Shipped]:
    """Return the configurations of a package of kernels."""
    module = import_module(f"sparseformer.kernels.{room}.compile_cases")
    shipped = [Shipped(case, ARCHITECTURES) for case in module.compile_cases()]
    if room == "entmax_attention":
        shipped += [Shipped(case, WITH_WARP_GROUPS) for case in warp_group_cases()]
    return shipped


def _up_to_date(entry: dict[str, Any] | None, case: CompileCase) -> dict[str, Any]:
    """Return what is known of a case, which is nothing if its source or options have changed."""
    current = fingerprint(case)
    known = {"source": current, "triton": version("triton")}
    if entry is not None and known.items() <= entry.items():
        return entry
    return known | {"warps": case.launch.num_warps}


def _compiled(jobs: list[Job], processes: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    if processes == 1:
        yield from zip(jobs, map(_compile, jobs), strict=True)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from zip(jobs, pool.map(_compile, jobs), strict=True)


def _compile(job: Job) -> dict[str, Any]:
    case = shipped_cases(job.room)[job.index].case
    options = case.launch.options()
    compiled = compile_kernel(case.kernel, job.arch, case.types, case.constants, options)
    return {
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "shared": compiled.shared,
        "products": next((name for name in PRODUCTS if name in compiled.ptx), None),
    }


def _save(results: Results) -> None:
    """Write one line for each configuration, so that a change shows as the lines it changes."""
    lines = (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in results.items())
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
