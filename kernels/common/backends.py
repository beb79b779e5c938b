"""Which implementation serves a call: Triton on a GPU, compiled C++ or plain PyTorch elsewhere."""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal, cast

import torch
from torch import Tensor

Backend = Literal["auto", "pytorch", "cpp", "triton"]
Chosen = Literal["pytorch", "cpp", "triton"]

logger = logging.getLogger("sparseformer")

# Older GPUs lack the bf16 arithmetic and the instructions that the kernels are compiled to.
MIN_CAPABILITY = (8, 0)


def check_backend(name: str, backend: str, allowed: tuple[Chosen, ...]) -> None:
    """Refuse a backend that no operation has, or that this one hasn't; traceable.

    Raises:
        ValueError: backend is neither "auto" nor one of `allowed`.
    """
    choices = ("auto", *allowed)
    if backend not in choices:
        shown = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: backend is {backend!r}, but it must be one of {shown}.")


def choose_backend(
    name: str,
    backend: str,
    tensor: Tensor,
    allowed: tuple[Chosen, ...] = ("pytorch", "triton"),
    *,
    interprets_float64: bool = False,
) -> Chosen:
    """Return the implementation for a call on this tensor; "auto" never fails.

    Args:
        name: the public function, for messages.
        backend: a checked Backend; "auto" is Triton on a GPU of compute capability 8.0 or later,
            compiled C++ on a CPU where `allowed` has it and a compiler is found, else PyTorch.
        tensor: the main input.
        allowed: what the operation is implemented in.
        interprets_float64: whether its kernels compute in float64 in Triton's interpreter, where
            they are differentiated numerically.

    Raises:
        ValueError: the backend that was asked for can't serve this tensor on this machine.
    """
    check_backend(name, backend, allowed)
    if backend == "auto":
        return _automatic(tensor.device, tensor.dtype, allowed)
    reason = None
    if backend == "triton":
        reason = _why_no_triton(tensor.device, tensor.dtype, interprets_float64)
    elif backend == "cpp":
        reason = _why_no_cpp(tensor.device, tensor.dtype)
    if reason:
        raise ValueError(f"{name}: backend {backend!r} can't serve this call: {reason}.")
    return cast(Chosen, backend)


@cache
def _automatic(device: torch.device, dtype: torch.dtype, allowed: tuple[Chosen, ...]) -> Chosen:
    if device.type == "cuda" and "triton" in allowed:
        reason = _why_no_triton(device, dtype)
        if reason is None:
            return "triton"
        _say_once(f"sparseformer uses plain PyTorch on {device}: {reason}.")
    if device.type == "cpu" and "cpp" in allowed and _why_no_cpp(device, dtype) is None:
        return "cpp"
    return "pytorch"


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _why_no_triton(
    device: torch.device, dtype: torch.dtype, interprets_float64: bool = False
) -> str | None:
    """Return None if a Triton kernel can run there."""
    if find_spec("triton") is None:
        return "triton isn't installed (pip install triton)"
    interpreting = is_interpreting()
    if dtype == torch.float64 and not (interpreting and interprets_float64):
        return "it computes in float32; use backend='pytorch' for float64"
    if interpreting:
        return None
    if device.type != "cuda":
        return f"it needs a tensor on a GPU, got one on {device}; use backend='auto'"
    return _why_no_capability(device)


@cache
def _why_no_capability(device: torch.device) -> str | None:
    found = torch.cuda.get_device_capability(device)
    if found >= MIN_CAPABILITY:
        return None
    return (
        f"it needs a GPU of compute capability {'.'.join(map(str, MIN_CAPABILITY))} or later, "
        f"and {torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}"
    )


def _why_no_cpp(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None if the C++ code can serve a tensor there."""
    if device.type != "cpu":
        return f"it needs a tensor on the CPU, got one on {device}"
    if dtype == torch.float64:
        return "it computes in float32; use backend='pytorch' for float64"
    from sparseformer.kernels.common.native import why_no_compiler

    return why_no_compiler()


def is_interpreting() -> bool:
    """Say whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1), on any device."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
