"""Launch helpers: integer arithmetic, bf16 under the interpreter, and the options of a launch."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import is_interpreting

# Of one multiprocessor, 32 bits each; one thread has at most 255.
REGISTERS = 65_536


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: warps and pipeline stages of one program.

    Multiply-adds are fused, which is also Triton's choice up to 3.9, there with a warning.
    """

    num_warps: int = 4
    num_stages: int = 2

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of a launch, and the options of `compile_kernel`."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True)
class RoomyLaunch(Launch):
    """A launch whose kernel may use every register; else some spill to fit a second program."""

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of a launch, and the options of `compile_kernel`."""
        return {**super().options(), "maxnreg": min(255, REGISTERS // (32 * self.num_warps))}


@cache
def multiplies_by_warp_groups(device: torch.device) -> bool:
    """Say whether four warps of that GPU multiply tiles together, from shared memory.

    So it is on sm_90 to sm_110. Elsewhere, also on sm_120, both operands take registers. Triton's
    interpreter has one configuration, which fits any GPU.
    """
    if device.type != "cuda" or is_interpreting():
        return False
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


@cache
def smaller_launches(launch: Launch) -> tuple[Launch, ...]:
    """Return the launch and those that need less shared memory: a buffer of each tile less."""
    return tuple(replace(launch, num_stages=n) for n in range(launch.num_stages, 0, -1))


@cache
def larger_launches(launch: Launch) -> tuple[Launch, ...]:
    """Return what may be quicker on some cards: another buffer of each tile, other warps."""
    warps = launch.num_warps // 2 if launch.num_warps > 4 else launch.num_warps * 2
    return (
        replace(launch, num_stages=launch.num_stages + 1),
        replace(launch, num_warps=warps),
    )


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of 2 that is at least value; 1 for 0."""
    return 1 << max(value - 1, 0).bit_length()


def kernel_input(tensor: Tensor) -> Tensor:
    """Return what a kernel may read: the tensor itself, on a GPU.

    The interpreter computes bfloat16 on bit patterns (triton#11584), so it gets float32 there.
    """
    if tensor.dtype == torch.bfloat16 and is_interpreting():
        return tensor.float()
    return tensor
