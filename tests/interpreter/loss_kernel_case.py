"""What the tests of the loss kernels share: guarded memory, and operands between NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseformer.testing import SeeInside

NONE = -torch.inf
BAND = 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float32, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def between_nan(values: Tensor, step: int = 1, *, transposed: bool = False) -> Tensor:
    """Return equal values as a view of a larger matrix of NaN: reading past them shows."""
    values = values.T if transposed else values
    rows, width = values.shape
    frame = torch.full((rows + 2, step * width + 9), torch.nan, dtype=values.dtype)
    view = frame[1:-1, 3 : 3 + step * width : step].copy_(values)
    return view.T if transposed else view


# Strides at which the third row's, or column's, offset doesn't fit in int32.
FAR = 2**30


def far_matrices(folder: Path, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Return [3, 20] with rows FAR elements apart, and [1, 3] with such columns; both hold 0.

    The memory is a sparse file, of which only the pages in use exist.
    """
    far = torch.from_file(str(folder / str(dtype)), True, 2 * FAR + 2**12, dtype=dtype)
    return far.as_strided((3, 20), (FAR, 1)), far[20:].as_strided((1, 3), (1, FAR))


class Guarded:
    """Tensors with a band of a canary before and after, whose contents are unset or given."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def like(self, tensor: Tensor, *, unset: bool = False) -> Tensor:
        """Return a contiguous copy of the tensor, or one of its shape that holds nonsense."""
        numel, floating = tensor.numel(), tensor.is_floating_point()
        # Values of their own for the bands and for unset memory.
        buffer = torch.full((numel + 2 * BAND,), -77, dtype=tensor.dtype, device=tensor.device)
        inside = buffer[BAND : BAND + numel].view(tensor.shape)
        nonsense = torch.nan if floating else torch.iinfo(tensor.dtype).max
        inside.fill_(nonsense) if unset else inside.copy_(tensor)
        self._buffers.append((buffer, inside))
        return inside

    def check(self) -> None:
        """Hold that no band was written."""
        assert self._buffers
        for buffer, _ in self._buffers:
            assert bool((buffer[:BAND] == -77).all()), "written before the start"
            assert bool((buffer[-BAND:] == -77).all()), "written past the end"


@contextmanager
def guarded_allocations() -> Iterator[Guarded]:
    """Give what torch.empty and empty_like allocate guard bands and unset contents; check them."""
    guarded = Guarded()

    class Mode(SeeInside):
        def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = func(*args, **kwargs)
            if func.overloadpacket.__name__ in ("empty", "empty_like") and result.numel():
                return guarded.like(result, unset=True)
            return result

    with Mode():
        yield guarded
    guarded.check()
