"""Autograd of the losses on logits: saves the gradient's coefficients, few of each row."""

from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.rules import Rule


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are made in: float32 for half precision, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def take(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the chosen rows; all, without a copy, where `rows` is None."""
    return values if rows is None else values[rows]


def put(values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """Return num_rows rows that are 0 where not chosen; the inverse of `take`."""
    if rows is None:
        return values
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, rows, values)


def alpha_gradient(grad: Tensor, slope: Tensor, alpha: Tensor, rows: Tensor | None) -> Tensor:
    """Return the gradient of alpha, [] or [N], from that of the losses of the chosen rows."""
    product = grad * slope
    return product.sum() if alpha.ndim == 0 else put(product, rows, alpha.shape[0])


def refuse_second_derivative(name: str) -> None:
    """Raise when the backward pass is recorded: its result would be taken for a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative; call backward or torch.autograd.grad without "
            "create_graph=True."
        )


class LogitsLoss(torch.autograd.Function):
    """Losses [N] of logits [N, V]; rows outside `rows` are never read, and their loss is 0.

    alpha is None, [] or [N]; `rows` [n] is None where all rows count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        alpha: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        rows: Tensor | None,
        rule: Rule,
    ) -> Tensor:
        scores = take(logits, rows).to(accumulation_dtype(logits.dtype))
        top = scores.amax(-1)
        rule.refuse_bad_logits(scores, top, rows, "the layer that makes them")
        targets = rule.targets(target, weight, rows, scores)
        row_alpha = rule.alpha_of(alpha, rows, 0, scores.shape[0])
        result = rule.evaluate(scores, top, targets, row_alpha, ctx.needs_input_grad[1])
        saved = result.coefficients if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(saved, result.columns, result.alpha_slope, alpha, rows)
        ctx.name, ctx.shape, ctx.dtype = rule.name, logits.shape, logits.dtype
        return put(result.loss, rows, logits.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.name)
        coefficients, columns, slope, alpha, rows = ctx.saved_tensors
        grad = take(grad_output, rows)
        grad_logits = grad_alpha = None
        if ctx.needs_input_grad[0]:
            values = (coefficients * grad[:, None]).to(ctx.dtype)
            if columns is not None:
                # A class has one coefficient other than 0, so this sum is exact in any dtype.
                dense = values.new_zeros(values.shape[0], ctx.shape[1])
                values = dense.scatter_add_(-1, columns, values)
            grad_logits = put(values, rows, ctx.shape[0])
        if ctx.needs_input_grad[1]:
            grad_alpha = alpha_gradient(grad, slope, alpha, rows)
        return grad_logits, grad_alpha, None, None, None, None
