"""Launch helpers: integer arithmetic, bf16 under the interpreter, and the options of a launch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import is_interpreting


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
