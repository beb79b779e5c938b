"""What the innermost loop of a compiled kernel executes, by the unit that executes it."""

import re
import subprocess
from collections import Counter
from typing import Any, NamedTuple

from sparseformer.kernels.common.compilation import CompileCase, Compiled, compile_kernel

ARCHITECTURE = 90

# Which unit executes an instruction of sm_90, by the first part of its name (CUDA Binary
# Utilities). IMAD shares the multipliers of fp32; what starts with U runs beside them, once a warp.
UNITS = {
    "fma": {"FADD", "FMUL", "FFMA", "FFMA32I", "FMUL32I", "FADD32I", "IMAD"},
    "transcendental": {"MUFU"},
    "shuffle": {"SHFL", "REDUX", "CREDUX"},
    "memory": {"LDS", "STS", "LDSM", "STSM", "LDG", "STG", "LDGSTS", "LD", "ST", "LDC", "ULDC"},
    "tensor": {"HGMMA", "HMMA"},
    # They wait, or order what others do.
    "control": {
        "BRA", "BSYNC", "BSSY", "BAR", "MEMBAR", "WARPGROUP", "WARPSYNC", "DEPBAR", "LDGDEPBAR",
        "NOP", "ERRBAR", "FENCE", "CCTL", "SYNCS", "YIELD",
    },
}  # fmt: skip
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)([.\w]*)\s*([^;]*);")


class Instruction(NamedTuple):
    """One line of machine code.

    Attributes:
        address: in bytes.
        is_conditional: whether a predicate decides if it has an effect.
        name: the first part, such as HGMMA.
        rest: of the name, such as .64x32x16.F32.BF16.
        operands: as printed.
    """

    address: int
    is_conditional: bool
    name: str
    rest: str
    operands: str

    def target(self) -> int | None:
        """Return where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)", self.operands)
        return int(found[1], 16) if self.name == "BRA" and found else None

    def products(self) -> int:
        """Return the multiply-adds of a product of tiles: by a warp group (HGMMA) or a warp."""
        if self.name == "HGMMA":
            m, n, k = (int(x) for x in self.rest.split(".")[1].split("x"))
            return m * n * k
        # HMMA.16816: three numbers without separators.
        return 16 * 8 * 16 if self.name == "HMMA" and ".16816" in self.rest else 0

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that it moves, for a warp or, HGMMA, a warp group."""
        if self.name == "HGMMA":
            m, n, k = (int(x) for x in self.rest.split(".")[1].split("x"))
            first_in_registers = re.match(r"R\d+, R\d+", self.operands) is not None
            return 2 * k * (n if first_in_registers else m + n)
        if self.name not in ("LDS", "STS", "LDSM", "STSM", "LDGSTS"):
            return 0
        if self.name in ("LDSM", "STSM"):
            tiles = re.search(r"\.(?:MT?88)\.([124])", self.rest + ".1")
            return 128 * int(tiles[1] if tiles else 1)
        wide = re.search(r"\.(128|64|U?16|U?8)\b", self.rest)
        bits = int(wide[1].lstrip("U")) if wide else 32
        return 32 * bits // 8


class Mix(NamedTuple):
    """What one warp executes for a visit of a tile of 64 x 64 scores, in instructions.

    Attributes:
        counts: by unit.
        rare: further instructions, of tiles at the border of a mask or of rows with wide supports.
        products: multiply-adds of all warps.
        shared_bytes: moved by all warps.
        is_wgmma: whether products are of warp groups.
        names: of the instructions, for a closer look.
    """

    counts: Counter[str]
    rare: float
    products: float
    shared_bytes: float
    is_wgmma: bool
    names: Counter[str]


def loop_mix(code: list[Instruction], num_warps: int, products_per_tile: int, dim: int) -> Mix:
    """Return the mix of the loop over tiles: the innermost one with the most products.

    Of two equal ones, such as with and without a causal mask, the shorter counts. What a branch
    may skip and holds no product is set apart as rare: the mask of a tile at its border.

    Args:
        code: for sm_90.
        num_warps: of a program.
        products_per_tile: of a tile of scores with a matrix of `dim` columns.
        dim: D.
    """
    loops = [_between(code, target, at) for at, target in _backward(code)]
    most = max(sum(x.products() for x in loop) for loop in loops)
    loop = min((x for x in loops if sum(i.products() for i in x) == most), key=len)
    inside, rare = _split_rare(loop)
    groups = {
        name: num_warps // 4 if name == "HGMMA" else num_warps for name in {i.name for i in loop}
    }
    done = sum(i.products() * groups[i.name] for i in inside)
    visits = done / (products_per_tile * 64 * 64 * dim)
    counts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for instruction in inside:
        counts[_unit(instruction.name)] += 1
        names[instruction.name] += 1
    return Mix(
        counts=Counter({unit: n / visits for unit, n in counts.items()}),
        rare=len(rare) / visits,
        products=done / visits,
        shared_bytes=sum(i.shared_bytes() * groups[i.name] for i in inside) / visits,
        is_wgmma="HGMMA" in groups,
        names=Counter({name: n / visits for name, n in names.items()}),
    )


def solve_length(code: list[Instruction]) -> int:
    """Return the instructions of the longest innermost loop without products: a Newton step."""
    loops = [_between(code, target, at) for at, target in _backward(code)]
    return max(len(loop) for loop in loops if not any(x.products() for x in loop))


def compile_to_code(case: CompileCase) -> tuple[Compiled, list[Instruction]]:
    """Compile a case for sm_90, and disassemble it with the tool that Triton brings."""
    from triton import knobs

    cubins: list[str] = []

    def listen(*, metadata_group: dict[str, str], **_: Any) -> None:
        cubins.extend(path for name, path in metadata_group.items() if name.endswith(".cubin"))

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        options = case.launch.options()
        compiled = compile_kernel(case.kernel, ARCHITECTURE, case.types, case.constants, options)
    (cubin,) = cubins
    command = [knobs.nvidia.cuobjdump.path, "-sass", cubin]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return compiled, parse(printed)


def parse(listing: str) -> list[Instruction]:
    """Return the instructions of what `cuobjdump -sass` prints."""
    return [
        Instruction(int(found[1], 16), "@" in found[0], *found.groups()[1:])
        for found in LINE.finditer(listing)
    ]


def _backward(code: list[Instruction]) -> list[tuple[int, int]]:
    """Return the address and the target of each branch back that encloses no other one."""
    back = [(x.address, t) for x in code if (t := x.target()) is not None and t < x.address]
    return [
        (at, target)
        for at, target in back
        if not any(target <= t and a < at for a, t in back) or _has_products_alone(code, back, at)
    ]


def _has_products_alone(code: list[Instruction], back: list[tuple[int, int]], at: int) -> bool:
    """Say whether no loop inside of the one that ends here has a product."""
    target = dict(back)[at]
    inner = [(a, t) for a, t in back if target <= t and a < at]
    return not any(i.products() for a, t in inner for i in _between(code, t, a))


def _between(code: list[Instruction], first: int, last: int) -> list[Instruction]:
    return [x for x in code if first <= x.address <= last]


def _split_rare(loop: list[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """Set apart what a forward branch skips, if it has neither a product nor a copy of a tile."""
    rare: set[int] = set()
    for branch in loop:
        target = branch.target()
        if target is None or not branch.address < target <= loop[-1].address:
            continue
        if not (branch.is_conditional or ", " in branch.operands):
            continue
        skipped = _between(loop, branch.address + 1, target - 1)
        if not any(x.products() or x.name == "LDGSTS" for x in skipped):
            rare |= {x.address for x in skipped}
    return (
        [x for x in loop if x.address not in rare],
        [x for x in loop if x.address in rare],
    )


def _unit(name: str) -> str:
    for unit, names in UNITS.items():
        if name in names:
            return unit
    return "uniform" if name.startswith("U") or name == "R2UR" else "alu"
