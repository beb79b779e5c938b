"""Register an operation with torch, so that torch.compile and autograd know it by name."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

NAMESPACE = "sparseformer"
# What runs behind each operator, by full name: a dispatch mode of torch sees only the operator.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def define_operator(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Define sparseformer::name and return what calls it.

    The schema is written out, since `torch.library.custom_op` takes twice as long a call.

    Args:
        name: of the operator.
        schema: its arguments and results, such as "(Tensor x, float alpha) -> Tensor".
        implementation: what runs, on any device; its first argument is a tensor.
        fake: returns empty results of the right shapes, strides, dtypes and device.
        backward: called with ctx and the gradients of the results; returns one gradient for each
            argument.
        setup: called with ctx, inputs and output, saves what backward needs.
    """
    full = f"{NAMESPACE}::{name}"
    IMPLEMENTATIONS[full] = implementation
    torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(full, "default", _on_device_of_first(implementation))
    torch.library.register_fake(full, fake)
    torch.library.register_autograd(full, backward, setup_context=setup)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def _on_device_of_first(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Make the GPU of the first argument the current one, on which kernels are launched."""

    @wraps(implementation)
    def guarded(*arguments: Any) -> Any:
        if not arguments[0].is_cuda:
            return implementation(*arguments)
        with torch.cuda.device_of(arguments[0]):
            return implementation(*arguments)

    return guarded


def unknown_size() -> Any:
    """Return a size for a fake result that only the values of the inputs decide."""
    return torch.library.get_ctx().new_dynamic_size()


def no_second_derivative(names: str) -> Callable[..., Any]:
    """Return the backward of a gradient: an error that says which functions have no second one."""

    def backward(*_: Any) -> Any:
        raise RuntimeError(
            f"{names} have no second derivative; call backward or torch.autograd.grad without "
            "create_graph=True."
        )

    return backward
