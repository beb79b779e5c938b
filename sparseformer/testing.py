"""What tests of kernels share: the tolerance policy, poisoned memory, a gauge of tensor sizes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparseformer.kernels.common.operators import IMPLEMENTATIONS

Kind = Literal["forward", "gradient", "alpha"]

# How much further from float64 than plain PyTorch in the same dtype a kernel may be.
ERROR_FACTOR: dict[Kind, float] = {"forward": 2.0, "gradient": 3.0, "alpha": 3.0}
# RMS of the error over RMS of the reference, by the name of the dtype.
RMS_BOUND = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
MAX_SKIPPED_SHARE = 0.05


def assert_close_to_reference(
    actual: Tensor,
    expected64: Tensor,
    torch_same_dtype: Tensor | None = None,
    *,
    kind: Kind = "forward",
    skip: Tensor | None = None,
) -> None:
    """Hold a result to the float64 reference as tightly as its dtype allows.

    With err = |actual - expected64|, err_t = |torch_same_dtype - expected64| and
    floor = 2 max |((expected64 + 0.3) - 0.3) - expected64| rounded in the dtype of actual:

        max err <= c max err_t + floor   and   RMS(err) <= r RMS(expected64)

    c is 2 for forward results and 3 for gradients; r is 1e-5 for fp32, 5e-3 for fp16, 2e-2 for
    bf16 and 1e-12 for float64. Nothing may be NaN or infinite where the reference is finite.

    Args:
        actual: the result under test, any shape and floating dtype.
        expected64: float64, computed from the same inputs, already rounded to the test dtype.
        torch_same_dtype: plain PyTorch's result in the dtype of actual; without it, c max err_t
            is replaced by c r max |expected64|.
        kind: which c to use; "alpha" is the gradient with respect to alpha.
        skip: bool, broadcastable to actual: entries at a jump of a Jacobian (sparsemax). At most
            5 % may be skipped.

    Raises:
        AssertionError: names the worst index, both values, the error and the bound.
    """
    assert actual.shape == expected64.shape, f"{list(actual.shape)} vs {list(expected64.shape)}"
    assert expected64.dtype == torch.float64, f"the reference is {expected64.dtype}"
    if not actual.numel():
        return
    bounds = _bounds(actual, expected64, torch_same_dtype, ERROR_FACTOR[kind])
    error = (actual.detach().double() - expected64.detach()).abs()
    # inf - inf is NaN where both agree; a NaN or inf of our own stays and fails.
    agree = (actual == expected64) | (actual.isnan() & expected64.isnan())
    error = error.masked_fill(agree.detach(), 0.0)
    _check_errors(error.masked_fill(_checked_skip(skip, error), 0.0), actual, expected64, bounds)


@dataclass(frozen=True)
class _Bounds:
    worst: float
    rms: float


def _bounds(
    actual: Tensor, expected: Tensor, torch_same_dtype: Tensor | None, factor: float
) -> _Bounds:
    rms_bound = RMS_BOUND[str(actual.dtype).removeprefix("torch.")]
    finite = expected.detach()[expected.isfinite()]
    if not finite.numel():
        return _Bounds(0.0, 0.0)
    rounded = finite.to(actual.dtype)
    floor = 2.0 * float(((rounded + 0.3) - 0.3).double().sub(finite).abs().max())
    if torch_same_dtype is None:
        allowed = rms_bound * float(finite.abs().max())
    else:
        assert torch_same_dtype.dtype == actual.dtype, f"the baseline is {torch_same_dtype.dtype}"
        error = torch_same_dtype.detach().double()[expected.isfinite()] - finite
        allowed = float(error.abs().max())
    rms = rms_bound * float(finite.square().mean().sqrt())
    return _Bounds(worst=factor * allowed + floor, rms=rms)


def _checked_skip(skip: Tensor | None, error: Tensor) -> Tensor:
    if skip is None:
        return torch.zeros_like(error, dtype=torch.bool)
    skip = skip.expand_as(error)
    share = float(skip.double().mean())
    assert share <= MAX_SKIPPED_SHARE, f"{share:.1%} of the entries skipped, at most 5 % may be"
    return skip


def _check_errors(error: Tensor, actual: Tensor, expected: Tensor, bounds: _Bounds) -> None:
    # argmax takes a NaN for the largest.
    worst = torch.unravel_index(error.argmax(), error.shape)
    index = tuple(int(i) for i in worst)
    where = (
        f"at {index}: {actual[index].item()!r} instead of {expected[index].item()!r}, "
        f"dtype {actual.dtype}"
    )
    largest, rms = float(error[index]), float(error.square().mean().sqrt())
    assert largest <= bounds.worst, f"error {largest:.3e} > {bounds.worst:.3e} {where}"
    # A reference of zeros leaves no scale for the RMS; there the floor has decided.
    assert rms <= max(bounds.rms, bounds.worst if not expected.any() else 0.0), (
        f"RMS of the error {rms:.3e} > {bounds.rms:.3e}, worst {where}"
    )


@contextmanager
def poison_empty() -> Iterator[None]:
    """Fill what torch.empty and its kin allocate, so that reading unset memory shows.

    Floating-point and complex memory holds NaN, integers their largest value, booleans True.
    Covers empty, empty_like, empty_strided, new_empty and new_empty_strided.
    """

    def poison(name: str, result: Tensor) -> None:
        if name not in _EMPTY_OPS or not result.numel():
            return
        if result.is_floating_point() or result.is_complex():
            result.fill_(float("nan"))
        else:
            is_bool = result.dtype == torch.bool
            result.fill_(True if is_bool else torch.iinfo(result.dtype).max)

    with _Watch(poison):
        yield


_EMPTY_OPS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass
class TensorGauge:
    """What largest_tensor has seen.

    Attributes:
        numel: most elements of a tensor.
        shape: shape of that tensor.
        operation: the operation that made it, such as "bmm".
    """

    numel: int = 0
    shape: tuple[int, ...] = ()
    operation: str = ""


@contextmanager
def largest_tensor() -> Iterator[TensorGauge]:
    """Record the largest tensor that any operation inside the context returns.

    An expanded view counts with the memory behind it, so that only real allocations (and views
    of large inputs) are seen. A backward pass on the CPU inside the context is seen, too.
    """
    gauge = TensorGauge()

    def record(name: str, result: Tensor) -> None:
        stored = result.untyped_storage().nbytes() // max(result.element_size(), 1)
        numel = min(result.numel(), stored)
        if numel > gauge.numel:
            gauge.numel, gauge.shape, gauge.operation = numel, tuple(result.shape), name

    with _Watch(record):
        yield gauge


class SeeInside(TorchDispatchMode):
    """A dispatch mode that sees what our own operators do inside; a subclass defines `see`."""

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of torch and return its result."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        implementation = IMPLEMENTATIONS.get(func.name())
        if implementation is None:
            return self.see(func, args, kwargs or {})
        # The mode is off in here, and has to be on again for what the operator is made of.
        with self:
            return implementation(*args, **(kwargs or {}))


class _Watch(SeeInside):
    """Show every returned tensor and the name of its operation to a function."""

    def __init__(self, show: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._show = show

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation and show what it returns."""
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._show(func.overloadpacket.__name__, leaf)
        return result
