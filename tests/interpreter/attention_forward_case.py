"""What the forward kernels of attention must give: the dense float64 definition, and counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from attention_backward_case import (
    BackwardCase,
    _by_query_head,
    _keep_factors,
    _probabilities,
)
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from sparseformer.kernels.entmax_attention.arguments import Arguments

FLOATS = ("query", "key", "value", "alpha", "relative_bias")


def reference_output(case: BackwardCase, arguments: Arguments) -> Tensor:
    """Return the float64 output; what hidden slots hold doesn't matter."""
    wide = arguments._replace(**{name: _double(getattr(arguments, name)) for name in FLOATS})
    probs = _probabilities(case, wide) * _keep_factors(case, arguments)
    return probs @ _by_query_head(case, wide.value)


def plain_output(case: BackwardCase, arguments: Arguments) -> Tensor:
    """Return what plain PyTorch gives in the dtype of query: scores, p and the product rounded."""
    dtype = arguments.query.dtype
    wide = arguments._replace(**{name: _double(getattr(arguments, name)) for name in FLOATS})
    probs = (_probabilities(case, wide) * _keep_factors(case, arguments)).to(dtype)
    return probs @ _by_query_head(case, arguments.value)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


class Work:
    """Counts of what interpreted kernels did: products, and programs by kernel."""

    def __init__(self) -> None:
        self.products = 0
        self.loaded_bytes = 0


@contextmanager
def counting() -> Iterator[Work]:
    """Count the tile products and the bytes read of kernels that run inside the block."""
    work = Work()
    create_dot, load = InterpreterBuilder.create_dot, InterpreterBuilder.create_masked_load

    def counted_dot(self: Any, *args: Any, **kwargs: Any) -> Any:
        work.products += 1
        return create_dot(self, *args, **kwargs)

    def counted_load(self: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        value = load(self, pointers, mask, *args, **kwargs)
        shape, itemsize = value.data.shape, value.data.itemsize
        work.loaded_bytes += int(np.count_nonzero(np.broadcast_to(mask.data, shape))) * itemsize
        return value

    InterpreterBuilder.create_dot = counted_dot
    InterpreterBuilder.create_masked_load = counted_load
    try:
        yield work
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.create_masked_load = create_dot, load
