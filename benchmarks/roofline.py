"""Estimate what limits each attention kernel on an H100, beside AdaSplash-2's, without a GPU.

    pip install --no-deps adasplash==0.2.2
    python benchmarks/roofline.py > docs/roofline.md

Every kernel is compiled for sm_90 and disassembled. The instructions of its loop over tiles,
divided by the rate of the unit that executes them, give the clocks that a tile takes of each unit.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from instruction_mix import Mix, compile_to_code, loop_mix, solve_length
from interpreted_adasplash import INSTALL

from sparseformer.kernels.common.compilation import CompileCase
from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax_attention.backward_cases import warp_group_cases
from sparseformer.kernels.entmax_attention.compile_cases import compile_cases

DIM = 64
# Of one multiprocessor and clock. H100 SXM: 989.4 TFLOPS of dense bf16 with 132 multiprocessors at
# 1830 MHz (NVIDIA H100 data sheet); lanes by the CUDA C++ Programming Guide, throughput of native
# arithmetic instructions, compute capability 9.0; 32 banks of 4 bytes; 4 schedulers of a warp each.
TENSOR_PER_CLOCK = 2048
SHARED_BYTES_PER_CLOCK = 128
LANES = {"fma": 128, "alu": 64, "transcendental": 16, "shuffle": 32}
ISSUED_PER_CLOCK = 4
UNITS = ("tensor cores", "shared memory", "fp32", "integer", "special", "issue")
NAMES = {"fma": "fp32", "alu": "integer", "transcendental": "special"}
# Products with a tile of scores, and passes over the tiles, of AdaSplash-2's kernels (causal,
# alpha 1.5, its default of one refinement).
PEERS = {
    "_get_tau": (1, 1),
    "_get_tau_v2": (1, 1),
    "_get_tau_v3": (1, 2),
    "_get_output": (3, 1),
    "_bwd_q_kernel": (3, 1),
    "_bwd_kv_kernel": (4, 1),
}
OURS = {"forward sketch": 1, "forward output": 3, "backward query": 3, "backward key": 4}
# The backward pass has plans of its own for this GPU.
BY_WARP_GROUPS = ("backward query", "backward key")
GROUPS = {"ours, alpha 1.5": 0.5, "ours, learned alpha": None}
OTHERS = {f"{group}, with the plans of other GPUs": eps for group, eps in GROUPS.items()}
PEER_CONSTANTS = {
    "N_H": 8,
    "N_KV_H": 8,
    "GROUP_SIZE": 1,
    "H_DIM": DIM,
    "N_CTX": 4096,
    "IS_VARLEN": False,
    "VARLEN": None,
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BINS": 8,
    "NITER": 1,
    "N_INT32s": 2,
    "NEED_BACKWARD": True,
}

PAGE = """\
# What limits the attention kernels

**An estimate, not a measurement.** Written by `python benchmarks/roofline.py`, which compiles each
kernel for sm_90 with triton {triton} (bf16, D = 64) and disassembles it: the instructions of the
loop over tiles, divided by the rate of the unit that executes them on an H100, are the clocks that
a tile of 64 x 64 scores takes of that unit of a multiprocessor. The largest is a lower bound of the
time of the tile; waiting and memory come on top. AdaSplash-2 is adasplash {peer}, with 4 warps, 2
stages and tiles of 64 x 64; on a GPU it times larger ones for its first pass, too.

Rates per multiprocessor and clock: tensor cores {tensor} multiply-adds of bf16, shared memory
{shared} bytes (operands of products included), fp32 multiply-adds 128, integers, comparisons,
conversions and moves 64, exp2, log2 and reciprocals 16, {issue} warps issue one instruction each.

{table}

`rare` are further instructions of a warp that only some tiles execute: at the border of a mask, or
in rows with wide supports. They are in none of the columns.

## A whole pass

Clocks of the limiting unit for a visible tile, if a share s of the tiles is active. One pass is a
visit of every visible tile; AdaSplash-2 makes four to find its threshold.

{passes}

## What follows

- At D = 64 no kernel is limited by its products, so what counts is the work on each score.
- The first pass keeps the largest scores of each lane by minima and maxima, of which a
  multiprocessor does half as many as multiplications: {sketch_alu:.0f} clocks a tile, against
  {peer_passes:.0f} of the four passes that it takes the place of. A Newton step on what it keeps
  takes {solve:.0f} clocks for a block of 64 queries, {solve_learned:.0f} with a learned alpha, or
  {solve_tiles:.1f} and {solve_learned_tiles:.1f} visits of a tile, if supports reach down to the
  fourth score of a lane; less where only larger ones can be in one. Two follow
  whenever four times as many tiles have been seen, and a few at the end.
- The backward pass is limited by shared memory, from which each product reads its operands, unless
  alpha is learned. So GPUs that multiply by warp groups take whole tiles there: {key:.0f} clocks
  instead of {key_elsewhere:.0f} for keys, {query:.0f} instead of {query_elsewhere:.0f} for queries
  with alpha 1.5. Elsewhere whole tiles would spill registers.
- A learned alpha costs {powers:.1f} times the instructions of alpha 1.5 in the output pass. Inputs
  of 16 bits take the GPU's own logarithm for it (lg2.approx, and a series near 1), fp32 a
  polynomial. What is left is one logarithm and two exponentials for each score, at 16 a clock.
  `backward query`, which adds d alpha, is limited by the instructions that are issued.
"""


class Row(NamedTuple):
    """One kernel.

    Attributes:
        group: whose it is, and for which alpha.
        kernel: its name.
        num_warps: of a program.
        mix: of its loop.
        passes: over the tiles.
        clocks: of each unit, for one tile.
        solve: clocks of a Newton step of the first pass, by what is issued; else 0.
    """

    group: str
    kernel: str
    num_warps: int
    mix: Mix
    passes: int
    clocks: dict[str, float]
    solve: float

    @property
    def limit(self) -> str:
        """Return the unit that takes longest."""
        return max(self.clocks, key=lambda unit: self.clocks[unit])


def main() -> None:
    """Print the page."""
    rows = [
        *(row for group, eps in GROUPS.items() for row in _our_rows(group, eps, tuple(OURS), True)),
        *_peer_rows(),
    ]
    others = [
        row for group, eps in OTHERS.items() for row in _our_rows(group, eps, BY_WARP_GROUPS, False)
    ]
    print(
        PAGE.format(
            triton=version("triton"),
            peer=version("adasplash"),
            tensor=TENSOR_PER_CLOCK,
            shared=SHARED_BYTES_PER_CLOCK,
            issue=ISSUED_PER_CLOCK,
            table=_table([*rows, *others]),
            passes=_passes(rows),
            **_figures(rows, others),
        ),
        end="",
    )


def _our_rows(
    group: str, eps: float | None, kernels: tuple[str, ...], has_warp_groups: bool
) -> Iterator[Row]:
    cases = {case.name: case for case in (*compile_cases(), *warp_group_cases())}
    for kernel in kernels:
        kind = " by warp groups" if has_warp_groups and kernel in BY_WARP_GROUPS else ""
        case = cases[f"{kernel}{kind} bf16 D={DIM} eps={eps}"]
        yield _row(group, kernel, case, OURS[kernel], 1)


def _peer_rows() -> Iterator[Row]:
    try:
        module = import_module("adasplash.adasplash_v2")
    except ModuleNotFoundError as error:
        raise SystemExit(INSTALL) from error
    for name, (products, passes) in PEERS.items():
        found: Any = getattr(module, name)
        case = _peer_case(getattr(found, "fn", found))
        yield _row("AdaSplash-2, alpha 1.5", name, case, products, passes)


def _peer_case(kernel: Any) -> CompileCase:
    names = kernel.arg_names
    constants = {name: x for name, x in PEER_CONSTANTS.items() if name in names}
    pointers = {"TAUS": "*fp32", "D": "*fp32", "BMASK": "*i32", "sm_scale": "fp32"}
    types = {
        name: "i32:16" if name.startswith("stride_") else pointers.get(name, "*bf16")
        for name in names
        if name not in constants
    }
    return CompileCase(kernel.__name__, kernel, types, constants, Launch(4, 2))


def _row(group: str, kernel: str, case: CompileCase, products: int, passes: int) -> Row:
    _, code = compile_to_code(case)
    warps = case.launch.num_warps
    mix = loop_mix(code, warps, products, DIM)
    solve = solve_length(code) * warps / ISSUED_PER_CLOCK if kernel == "forward sketch" else 0.0
    return Row(group, kernel, warps, mix, passes, _clocks(mix, case.launch), solve)


def _clocks(mix: Mix, launch: Launch) -> dict[str, float]:
    issued = sum(mix.counts.values()) * launch.num_warps
    lanes = {NAMES[unit]: 32 * mix.counts[unit] * launch.num_warps / LANES[unit] for unit in NAMES}
    return {
        "tensor cores": mix.products / TENSOR_PER_CLOCK,
        "shared memory": mix.shared_bytes / SHARED_BYTES_PER_CLOCK,
        **lanes,
        "issue": issued / ISSUED_PER_CLOCK,
    }


def _table(rows: list[Row]) -> str:
    lines = ["| kernel | warps | " + " | ".join(UNITS) + " | limited by | rare |"]
    lines.append("|---" * (len(UNITS) + 4) + "|")
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            lines.append(f"| **{group}** |" + " |" * (len(UNITS) + 3))
        passes = f" (x {row.passes})" if row.passes > 1 else ""
        cells = " | ".join(f"{row.clocks[unit]:.0f}" for unit in UNITS)
        rare = f"{row.mix.rare:.0f}"
        name = f"`{row.kernel}`{passes}"
        lines.append(f"| {name} | {row.num_warps} | {cells} | {row.limit} | {rare} |")
    return "\n".join(lines)


def _passes(rows: list[Row]) -> str:
    lines = ["| | forward, s = 1 | s = 0.5 | s = 0.25 | backward, s = 1 | s = 0.5 | s = 0.25 |"]
    lines.append("|---" * 7 + "|")
    for group in dict.fromkeys(row.group for row in rows):
        cells = []
        for direction in ("forward", "backward"):
            mine = [row for row in rows if row.group == group and _direction(row) == direction]
            for share in (1.0, 0.5, 0.25):
                cells.append(f"{sum(_time(row, share) for row in mine):.0f}")
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _direction(row: Row) -> str:
    return "backward" if row.kernel.startswith(("backward", "_bwd")) else "forward"


def _time(row: Row, share: float) -> float:
    """Return the clocks for a visible tile; those that find t visit all tiles."""
    visits = row.passes if row.kernel == "forward sketch" or "tau" in row.kernel else share
    return visits * _longest(row)


def _figures(rows: list[Row], others: list[Row]) -> dict[str, float]:
    """Return the numbers of the last section."""
    fixed, learned = ({row.kernel: row for row in rows if row.group == g} for g in GROUPS)
    elsewhere = {row.kernel: row for row in others if row.group == next(iter(OTHERS))}
    peer_passes = [row.passes * _longest(row) for row in rows if "tau" in row.kernel]
    sketch, learned_sketch = fixed["forward sketch"], learned["forward sketch"]
    return {
        "sketch_alu": sketch.clocks["integer"],
        "peer_passes": sum(peer_passes),
        "solve": sketch.solve,
        "solve_tiles": sketch.solve / _longest(sketch),
        "solve_learned": learned_sketch.solve,
        "solve_learned_tiles": learned_sketch.solve / _longest(learned_sketch),
        "key": _longest(fixed["backward key"]),
        "key_elsewhere": _longest(elsewhere["backward key"]),
        "query": _longest(fixed["backward query"]),
        "query_elsewhere": _longest(elsewhere["backward query"]),
        "powers": _longest(learned["forward output"], "issue")
        / _longest(fixed["forward output"], "issue"),
    }


def _longest(row: Row, unit: str | None = None) -> float:
    return row.clocks[unit or row.limit]


if __name__ == "__main__":
    main()
