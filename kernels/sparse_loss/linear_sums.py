"""From spans of rows to one result, and from kept coefficients to the sums of the gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.linear import LinearRows, spans
from sparseformer.kernels.sparse_loss.products import (
    DENSE_COST_SHARE,
    Entries,
    Padded,
    SparseMatrix,
    concatenate,
    sparse_entries,
)
from sparseformer.kernels.sparse_loss.results import RowLoss


class Kept(NamedTuple):
    """The coefficients of the n rows that count, in one form for each row.

    Entries in row order; or, where `rows` is empty, the same number of slots for every row.
    """

    rows: Tensor  # [e] int32, or [0]
    columns: Tensor  # [e] int32
    values: Tensor  # [e]
    dense: Tensor  # [n, V], only when all logits were computed at once; else [0, V]
    again: Tensor  # [2 a] on the CPU: starts and stops of spans that are too dense to keep

    def sparse(self, call: LinearRows) -> SparseMatrix | None:
        """Return the sparse part, if there is one."""
        if self.values.numel() == 0:
            return None
        if self.rows.numel() > 0:
            return Entries(self.rows, self.columns, self.values)
        shape = (call.hidden.shape[0], -1)
        return Padded(self.columns.view(shape), self.values.view(shape), call.request.backend)

    @property
    def is_sparse(self) -> bool:
        """Whether there are no coefficients beside the sparse ones."""
        return self.dense.shape[0] == 0 and self.again.numel() == 0


class Evaluated(NamedTuple):
    """What the forward pass leaves of the n rows that count."""

    losses: Tensor  # [n]
    slope: Tensor  # [n], or [0]
    stats: Tensor  # [n, width], or [0, width]
    kept: Kept


def evaluate(call: LinearRows, stats_width: int) -> Evaluated:
    """Run the forward pass, and keep what the gradient needs if it is wanted."""
    num_rows, request = call.hidden.shape[0], call.request
    losses = call.hidden.new_zeros(num_rows, dtype=call.head.dtype)
    slope = losses.new_zeros(num_rows if request.slope else 0)
    stats = losses.new_zeros(num_rows if request.stats else 0, stats_width, dtype=torch.int64)
    keeper = _Keeper(call)
    for start, stop, result in call.results():
        losses[start:stop] = result.loss
        if result.alpha_slope is not None:
            slope[start:stop] = result.alpha_slope
        if result.stats is not None:
            stats[start:stop] = result.stats
        if request.gradient:
            keeper.add(start, stop, result)
    return Evaluated(losses, slope, stats, keeper.kept(losses))


class _Keeper:
    """Decides in which form the coefficients of each span are kept."""

    def __init__(self, call: LinearRows) -> None:
        self._call = call
        self._entries: list[Entries] = []
        self._padded: list[tuple[int, Tensor, Tensor]] = []
        self._dense: Tensor | None = None
        self._again: list[int] = []

    def add(self, start: int, stop: int, result: RowLoss) -> None:
        call = self._call
        coefficients = call.head.through_cap(result.coefficients, result.scores)
        num_classes = call.head.weight.shape[0]
        if _pays_padded(call, result.columns):
            assert result.columns is not None
            self._padded.append((start, result.columns.int(), coefficients))
            return
        entries = None
        if call.request.backend == "pytorch" and not call.rule.is_dense:
            entries = sparse_entries(coefficients, result.columns, num_classes, start)
        if entries is not None:
            self._entries.append(entries)
        elif call.tiling.whole:
            self._dense = _dense(coefficients, result.columns, num_classes)
        else:
            pieces = spans(start, stop, call.tiling.row_tokens)
            self._again.extend(bound for piece in pieces for bound in piece)

    def kept(self, like: Tensor) -> Kept:
        num_classes = self._call.head.weight.shape[0]
        again = torch.tensor(self._again, dtype=torch.int64)
        dense = like.new_empty(0, num_classes) if self._dense is None else self._dense
        if not self._padded:
            return Kept(*concatenate(self._entries, like), dense, again)
        # Spans that are computed again have empty slots here.
        shape = (like.shape[0], self._padded[0][1].shape[1])
        columns = torch.full(shape, -1, dtype=torch.int32, device=like.device)
        values = like.new_zeros(shape)
        for start, span_columns, span_values in self._padded:
            columns[start : start + span_columns.shape[0]] = span_columns
            values[start : start + span_values.shape[0]] = span_values
        return Kept(columns.new_empty(0), columns.flatten(), values.flatten(), dense, again)


def _pays_padded(call: LinearRows, columns: Tensor | None) -> bool:
    """Return whether the Triton kernels take these coefficients; a last slot is the target's."""
    if columns is None or call.request.backend != "triton":
        return False
    return (columns.shape[1] - 1) * DENSE_COST_SHARE <= call.head.weight.shape[0]


def _dense(coefficients: Tensor, columns: Tensor | None, num_classes: int) -> Tensor:
    if columns is None:
        return coefficients
    dense = coefficients.new_zeros(coefficients.shape[0], num_classes)
    return dense.scatter_add_(-1, columns, coefficients)


class Sums:
    """Sums of the gradients that are needed, in the accumulation dtype until the very end."""

    def __init__(self, call: LinearRows, grad: Tensor, kept: Kept, needed: list[bool]) -> None:
        """Add all parts; the spans that weren't kept are computed again."""
        self._call, self._grad = call, grad
        hidden, weight, dtype = call.hidden, call.head.weight, call.head.dtype
        self.hidden = hidden.new_zeros(hidden.shape, dtype=dtype) if needed[0] else None
        self.bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needed[2] else None
        sparse = kept.sparse(call)
        if isinstance(sparse, Entries) and kept.is_sparse:
            # Each class is summed in one go, so its sum can be rounded where it is made.
            dtype = weight.dtype
        self.weight = weight.new_zeros(weight.shape, dtype=dtype) if needed[1] else None
        if sparse is not None:
            self._add_sparse(sparse.scaled(grad))
        self._add_others(kept)

    def _add_others(self, kept: Kept) -> None:
        if kept.dense.shape[0] > 0:
            self._add_dense(kept.dense, 0, kept.dense.shape[0])
        bounds = kept.again.tolist()
        num_classes = self._call.head.weight.shape[0]
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
            result = self._call.evaluate(start, stop)
            coefficients = self._call.head.through_cap(result.coefficients, result.scores)
            self._add_dense(_dense(coefficients, result.columns, num_classes), start, stop)

    def _add_sparse(self, matrix: SparseMatrix) -> None:
        if self.hidden is not None:
            self.hidden += matrix.times(self._call.head.weight, self.hidden.shape[0])
        if self.weight is not None:
            matrix.add_transposed_times(self._call.hidden, self.weight)
        if self.bias is not None:
            matrix.add_column_sums(self.bias)

    def _add_dense(self, coefficients: Tensor, start: int, stop: int) -> None:
        """Add the part of rows start to stop, given their coefficients [stop - start, V]."""
        values = coefficients * self._grad[start:stop, None]
        # The products run in the dtype of their other factor, and their sums in float32.
        factor = values.to(self._call.hidden.dtype)
        if self.hidden is not None:
            self.hidden[start:stop] = factor @ self._call.head.weight
        if self.weight is not None:
            _add_product(self.weight, values.T, factor.T, self._call.hidden[start:stop])
        if self.bias is not None:
            self.bias += values.sum(0)


def _add_product(out: Tensor, exact: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to out; a half-precision product would round every chunk's sum."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    elif left.is_cuda:
        out += torch.mm(left, right, out_dtype=out.dtype)
    else:
        out.addmm_(exact, right.to(out.dtype))
