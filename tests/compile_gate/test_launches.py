"""The launches that only some GPUs get: smaller ones for small cards, plans for warp groups."""

import pytest
from gate import check_compiles

from sparseformer.kernels.common.compilation import SHARED_LIMITS, CompileCase, compile_kernel
from sparseformer.kernels.common.launch import smaller_launches
from sparseformer.kernels.entmax_attention.backward_cases import warp_group_cases
from sparseformer.kernels.entmax_attention.backward_plans import Plan, smaller_plans
from sparseformer.kernels.entmax_attention.compile_cases import compile_cases

CASES = {case.name: case for case in compile_cases()}
WARP_GROUP_CASES = warp_group_cases()
# Of each kernel, a case that takes most shared memory.
LARGEST = (
    "forward sketch fp32 D=256 eps=0.5",
    "forward output bf16 D=256 eps=0.5",
    "forward one tile bf16 D=256 eps=0.5",
    "forward softmax bf16 D=256",
    "forward decode output bf16 D=256",
    "backward query bf16 D=256 eps=None bias dropout",
    "backward key bf16 D=256 eps=None bias dropout",
    "backward bias bf16 D=256 eps=None bias dropout",
)


@pytest.mark.parametrize("name", LARGEST)
def test_every_launch_fits_a_card_of_24_gigabytes_and_the_last_takes_least(name: str) -> None:
    # sm_86 and sm_89 take turns; they have the same limit.
    arch = (86, 89)[LARGEST.index(name) % 2]
    usual, last = CASES[name], _smallest(CASES[name])
    shared = [
        compile_kernel(x.kernel, arch, x.types, x.constants, x.launch.options()).shared
        for x in (usual, last)
    ]
    assert shared[1] <= shared[0] <= SHARED_LIMITS[arch]


def _smallest(case: CompileCase) -> CompileCase:
    if case.name.startswith("forward"):
        return case._replace(launch=smaller_launches(case.launch)[-1])
    plan = smaller_plans(Plan(case.constants["BLOCK_N"], case.launch))[-1]
    return case._replace(constants={**case.constants, "BLOCK_N": plan.columns}, launch=plan.launch)


@pytest.mark.parametrize(
    "index", range(len(WARP_GROUP_CASES)), ids=lambda i: WARP_GROUP_CASES[i].name
)
def test_plans_for_warp_groups_use_them_without_spills(index: int) -> None:
    # The two GPUs take turns; eps and then the dtype change from case to case.
    arch = (90, 100)[(index + index // 4) % 2]
    compiled = check_compiles(WARP_GROUP_CASES[index], arch)
    assert ("wgmma" if arch == 90 else "tcgen05.mma") in compiled.ptx
