"""Count what interpreted Triton kernels do: matrix products, and bytes loaded and stored."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.runtime import interpreter

# Multiply-adds of one product of 64 x 64 tiles whose inner size is 64.
UNIT = 64**3
_COUNTED = ("create_dot", "create_masked_load", "create_masked_store")


@dataclass
class Work:
    """What one kernel, or several, did.

    Attributes:
        products: matrix products in units of 64 x 64 x 64 multiply-adds.
        loaded: bytes read that no mask left out, also where a cache would have served them.
        stored: bytes written.
    """

    products: float = 0.0
    loaded: int = 0
    stored: int = 0

    def __add__(self, other: "Work") -> "Work":
        """Return the work of both."""
        return Work(
            self.products + other.products,
            self.loaded + other.loaded,
            self.stored + other.stored,
        )

    @property
    def bytes(self) -> int:
        """Return the bytes loaded and stored."""
        return self.loaded + self.stored


@dataclass
class Counts:
    """The work of each kernel, by its name."""

    kernels: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))

    def total(self) -> Work:
        """Return the work of all of them."""
        return sum(self.kernels.values(), Work())


@contextmanager
def counting() -> Iterator[Counts]:
    """Yield counts that fill while interpreted kernels run inside the block.

    They depend on the kernels and their inputs only, so that two implementations can be compared
    exactly. What PyTorch itself reads and writes isn't counted.
    """
    counts, running = Counts(), [""]
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    # The interpreter sends loads and stores without a mask through the masked ones.
    originals = {name: getattr(builder, name) for name in _COUNTED}
    launch = executor.__call__

    def counted_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        running[0] = self.fn.__name__
        return launch(self, *args, **kwargs)

    def counted_dot(self: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        multiply_adds = a.data.size * b.data.shape[-1]
        counts.kernels[running[0]].products += multiply_adds / UNIT
        return originals["create_dot"](self, a, b, *args, **kwargs)

    def counted_load(self: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        value = originals["create_masked_load"](self, pointers, mask, *args, **kwargs)
        counts.kernels[running[0]].loaded += _bytes(value, mask)
        return value

    def counted_store(
        self: Any, pointers: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        counts.kernels[running[0]].stored += _bytes(value, mask)
        return originals["create_masked_store"](self, pointers, value, mask, *args, **kwargs)

    replaced = (counted_dot, counted_load, counted_store)
    for name, function in zip(_COUNTED, replaced, strict=True):
        setattr(builder, name, function)
    executor.__call__ = counted_launch
    try:
        yield counts
    finally:
        for name, function in originals.items():
            setattr(builder, name, function)
        executor.__call__ = launch


def _bytes(value: Any, mask: Any) -> int:
    used = int(np.count_nonzero(np.broadcast_to(mask.data, value.data.shape)))
    return used * int(value.data.itemsize)
