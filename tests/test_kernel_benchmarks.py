"""The tables of registers and instructions: what they read from machine code, and what follows."""

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")

# A loop over tiles of 64 x 64 scores, D = 64, four warps: one product by a warp group, and a branch
# around the mask of a border tile. Before it a loop that multiplies nothing.
LISTING = """\
        /*0000*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0010*/                   FADD R3, R3, R4 ;
        /*0020*/              @P0  BRA 0x10 ;
        /*0030*/                   LDSM.16.M88.4 R8, [R5] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/              @!P1 BRA 0xb0 ;
        /*0090*/                   ISETP.GE.AND P2, PT, R3, R4, PT ;
        /*00a0*/                   FSEL R24, R24, -INF, P2 ;
        /*00b0*/                   FFMA R24, R24, R6, -R7 ;
        /*00c0*/                   MUFU.EX2 R24, R24 ;
        /*00d0*/                   FMNMX R9, R9, R24, !PT ;
        /*00e0*/              @P0  BRA 0x30 ;
        /*00f0*/                   EXIT ;
"""


@pytest.fixture
def mix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import instruction_mix

    return instruction_mix


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import kernel_tables

    return kernel_tables


def test_the_loop_with_products_is_counted_by_unit(mix: ModuleType) -> None:
    found = mix.loop_mix(mix.parse(LISTING), num_warps=4, products_per_tile=1, dim=64)
    assert found.is_wgmma
    assert found.products == 64**3
    assert dict(found.counts) == {
        "memory": 1, "tensor": 4, "control": 2, "fma": 1, "transcendental": 1, "alu": 1,
    }  # fmt: skip
    # The mask is skipped by most tiles.
    assert found.rare == 2
    # A warp group reads both operands once for each product, four warps load 512 bytes each.
    assert found.shared_bytes == 4 * 2 * 16 * (64 + 64) + 4 * 512


def test_the_length_of_a_newton_step_is_that_of_the_loop_without_products(mix: ModuleType) -> None:
    assert mix.solve_length(mix.parse(LISTING)) == 2


def test_a_visit_with_half_of_the_keys_counts_twice_for_a_tile(mix: ModuleType) -> None:
    narrow = LISTING.replace("64x64x16", "64x32x16")
    found = mix.loop_mix(mix.parse(narrow), num_warps=4, products_per_tile=1, dim=64)
    assert found.counts["transcendental"] == 2
    assert found.products == 64**3


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "arch", "warps"),
    [
        (32, 0, 4, 90, 64),  # as many as there are
        (128, 0, 4, 90, 16),  # 65,536 registers
        (129, 0, 4, 90, 12),  # registers come in units of 8 for each thread
        (32, 100 * 1024, 4, 90, 8),  # two programs of 100 KiB
        (255, 0, 8, 89, 8),
        (32, 0, 1, 89, 24),  # one warp each, 24 programs
    ],
)
def test_occupancy_is_that_of_the_scarcest(
    tables: ModuleType, registers: int, shared: int, num_warps: int, arch: int, warps: int
) -> None:
    assert tables.occupancy(registers, shared, num_warps, arch) == warps


def test_the_page_sums_up_and_names_what_spills(tables: ModuleType) -> None:
    needs = {"registers": 100, "spilled": 0, "shared": 2048, "products": "wgmma"}
    entry = {"source": "x", "warps": 4} | {str(arch): needs for arch in (80, 89, 90, 100)}
    spills = entry | {"80": needs | {"registers": 255, "spilled": 8}}
    results = {"room/forward bf16 D=64": entry, "room/forward bf16 D=128": spills}
    assert tables.spilling(results) == ["room/forward bf16 D=128"]
    page = tables.page(results, "3.9.0")
    assert "These spill: room/forward bf16 D=128." in page
    assert "| forward | bf16 | 2 | 100 - 255, 2 KiB, 8 - 16 |" in page
    assert "No kernel spills." in tables.page({"room/forward bf16 D=64": entry}, "3.9.0")
