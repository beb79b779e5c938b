"""Autograd of the losses on hidden states: saves sparse coefficients, or computes a span again."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.autograd import (
    accumulation_dtype,
    alpha_gradient,
    put,
    refuse_second_derivative,
    take,
)
from sparseformer.kernels.sparse_loss.linear import Head, LinearRows, Tiling, spans
from sparseformer.kernels.sparse_loss.products import (
    SparseMatrix,
    concatenate,
    sparse_matrix,
)
from sparseformer.kernels.sparse_loss.reference import RowLoss
from sparseformer.kernels.sparse_loss.rules import Rule


class _Forward(NamedTuple):
    """What the forward pass leaves: losses, and coefficients in one of three forms."""

    losses: Tensor  # [n]
    slope: Tensor | None  # [n]
    sparse: SparseMatrix
    dense: Tensor | None  # [n, V], only when all logits were computed at once
    again: list[tuple[int, int]]  # spans that are too dense to keep


class _Operands(NamedTuple):
    """The tensors of one call, as they are saved for the backward pass."""

    hidden: Tensor  # [N, D]
    linear_weight: Tensor  # [V, D]
    linear_bias: Tensor | None  # [V]
    alpha: Tensor | None  # [] or [N]
    target: Tensor  # [N]
    weight: Tensor | None  # [V]
    rows: Tensor | None  # [n]

    def linear_rows(self, rule: Rule, needs_slope: bool = False) -> LinearRows:
        """Return the rows that count, with the tiling that both passes use."""
        dtype = accumulation_dtype(self.hidden.dtype)
        hidden = take(self.hidden, self.rows)
        alpha, num_classes = self.alpha, self.linear_weight.shape[0]
        return LinearRows(
            hidden=hidden,
            head=Head(self.linear_weight, self.linear_bias, rule.softcap, dtype),
            targets=rule.targets(
                self.target, self.weight, self.rows, hidden.new_empty(0, dtype=dtype)
            ),
            alpha=alpha if alpha is None or alpha.ndim == 0 else take(alpha, self.rows),
            rows=self.rows,
            rule=rule,
            tiling=Tiling.choose(hidden.shape[0], num_classes, rule.chunk_size),
            needs_slope=needs_slope,
        )


class LinearLoss(torch.autograd.Function):
    """Losses [N] of hidden states [N, D] and an output matrix [V, D]; as LogitsLoss else."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        alpha: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        rows: Tensor | None,
        rule: Rule,
    ) -> Tensor:
        operands = _Operands(hidden, linear_weight, linear_bias, alpha, target, weight, rows)
        call = operands.linear_rows(rule, ctx.needs_input_grad[3])
        with torch.autocast(hidden.device.type, enabled=False):
            result = _evaluate(call, keep=any(ctx.needs_input_grad[:3]))
        ctx.save_for_backward(*operands, result.slope, *result.sparse, result.dense)
        ctx.rule, ctx.again = rule, result.again
        return put(result.losses, rows, hidden.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.rule.name)
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        operands, slope, dense = _Operands(*saved[:7]), saved[7], saved[11]
        call, grad = operands.linear_rows(ctx.rule), take(grad_output, operands.rows)
        sums = _Sums(call, grad, ctx.needs_input_grad[:3])
        with torch.autocast(grad.device.type, enabled=False):
            sums.add_sparse(SparseMatrix(*saved[8:11]))
            if dense is not None:
                sums.add_dense(dense, 0, dense.shape[0])
            for start, stop in ctx.again:
                sums.add_dense(_coefficients(call, call.evaluate(start, stop)), start, stop)
        grad_alpha = None
        if operands.alpha is not None and ctx.needs_input_grad[3]:
            grad_alpha = alpha_gradient(grad, slope, operands.alpha, operands.rows)
        return *sums.gradients(operands), grad_alpha, None, None, None, None


def _evaluate(call: LinearRows, keep: bool) -> _Forward:
    """Run the forward pass; with `keep`, leave what the gradient needs."""
    losses = call.hidden.new_zeros(call.hidden.shape[0], dtype=call.head.dtype)
    slope = torch.zeros_like(losses) if call.needs_slope else None
    parts: list[SparseMatrix] = []
    again: list[tuple[int, int]] = []
    dense = None
    for start, stop, result in call.results():
        losses[start:stop] = result.loss
        if slope is not None and result.alpha_slope is not None:
            slope[start:stop] = result.alpha_slope
        if not keep:
            continue
        coefficients = call.head.through_cap(result.coefficients, result.scores)
        num_classes = call.head.weight.shape[0]
        matrix = None
        if not call.rule.is_dense:
            matrix = sparse_matrix(coefficients, result.columns, num_classes, start)
        if matrix is not None:
            parts.append(matrix)
        elif call.tiling.whole:
            dense = _dense(coefficients, result.columns, num_classes)
        else:
            again.extend(spans(start, stop, call.tiling.row_tokens))
    return _Forward(losses, slope, concatenate(parts, losses), dense, again)


def _coefficients(call: LinearRows, result: RowLoss) -> Tensor:
    coefficients = call.head.through_cap(result.coefficients, result.scores)
    return _dense(coefficients, result.columns, call.head.weight.shape[0])


def _dense(coefficients: Tensor, columns: Tensor | None, num_classes: int) -> Tensor:
    if columns is None:
        return coefficients
    dense = coefficients.new_zeros(coefficients.shape[0], num_classes)
    return dense.scatter_add_(-1, columns, coefficients)


class _Sums:
    """Sums of the gradients that are needed, in the accumulation dtype."""

    def __init__(self, call: LinearRows, grad: Tensor, needed: tuple[bool, bool, bool]) -> None:
        self._call, self._grad = call, grad
        hidden, weight, dtype = call.hidden, call.head.weight, call.head.dtype
        self._hidden = hidden.new_zeros(hidden.shape, dtype=dtype) if needed[0] else None
        self._weight = weight.new_zeros(weight.shape, dtype=dtype) if needed[1] else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needed[2] else None

    def add_sparse(self, matrix: SparseMatrix) -> None:
        """Add the part of rows whose coefficients were kept as a sparse matrix."""
        if matrix.values.numel() == 0:
            return
        matrix = matrix._replace(values=matrix.values * self._grad[matrix.rows])
        if self._hidden is not None:
            self._hidden += matrix.times(self._call.head.weight, self._hidden.shape[0])
        if self._weight is not None:
            matrix.add_transposed_times(self._call.hidden, self._weight)
        if self._bias is not None:
            matrix.add_column_sums(self._bias)

    def add_dense(self, coefficients: Tensor, start: int, stop: int) -> None:
        """Add the part of rows start to stop, given their coefficients [stop - start, V]."""
        values = coefficients * self._grad[start:stop, None]
        # The products run in the dtype of their other factor, and their sums in float32.
        factor = values.to(self._call.hidden.dtype)
        if self._hidden is not None:
            self._hidden[start:stop] = factor @ self._call.head.weight
        if self._weight is not None:
            _add_product(self._weight, factor.T, self._call.hidden[start:stop])
        if self._bias is not None:
            self._bias += values.sum(0)

    def gradients(self, operands: _Operands) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden, linear_weight and linear_bias in their dtypes."""
        dtype = operands.hidden.dtype
        hidden = None if self._hidden is None else self._hidden.to(dtype)
        return (
            None if hidden is None else put(hidden, operands.rows, operands.hidden.shape[0]),
            None if self._weight is None else self._weight.to(dtype),
            None if self._bias is None else self._bias.to(dtype),
        )


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right
