"""Products of a sparse [tokens, classes] matrix with the hidden states and the output matrix."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen

# A gathered multiply-add costs about eight of a dense product's (measured on one core, widths of
# 128 to 512), so a matrix with more entries than an eighth is multiplied as a dense one.
DENSE_COST_SHARE = 8
# Sums of classes are made for so many elements of the result at once: 4 MiB in float32.
BLOCK_NUMEL = 2**20


class Entries(NamedTuple):
    """Entries in row order, several of one place being added."""

    rows: Tensor  # [entries] int32
    columns: Tensor  # [entries] int32
    values: Tensor  # [entries]

    def scaled(self, grad: Tensor) -> "Entries":
        """Return the matrix with row i multiplied by grad[i]."""
        return self._replace(values=self.values * grad[self.rows])

    def times(self, dense: Tensor, num_rows: int) -> Tensor:
        """Return the product [num_rows, D] with dense [V, D], summed in the dtype of `values`."""
        counts = torch.bincount(self.rows, minlength=num_rows)
        return _bag(self.columns, self.values, counts, dense)

    def add_transposed_times(self, dense: Tensor, out: Tensor) -> None:
        """Add the transposed matrix times dense [n, D] to out [V, D], class by class in order."""
        order = self.columns.argsort(stable=True)
        segment_sum(self.rows[order], self.columns[order], self.values[order], dense, out)

    def add_column_sums(self, out: Tensor) -> None:
        """Add the sum of each column to out [V]."""
        out.index_add_(0, self.columns, self.values)


class Padded(NamedTuple):
    """The same number of slots for each row, which the Triton kernels read without a count."""

    columns: Tensor  # [n, m] int32; -1 in an empty slot
    values: Tensor  # [n, m]; 0 in an empty slot
    backend: Chosen

    def scaled(self, grad: Tensor) -> "Padded":
        """Return the matrix with row i multiplied by grad[i]."""
        return self._replace(values=self.values * grad[:, None])

    def times(self, dense: Tensor, num_rows: int) -> Tensor:
        """Return the product [n, D] with dense [V, D], in float32."""
        assert num_rows == self.columns.shape[0], num_rows
        if self.backend == "triton":
            from sparseformer.kernels.sparse_loss import products_kernel

            return products_kernel.gather_scale(self.columns, self.values, dense)
        return gather_scale(self.columns, self.values, dense)

    def add_transposed_times(self, dense: Tensor, out: Tensor) -> None:
        """Add the transposed matrix times dense [n, D] to out [V, D], class by class in order."""
        columns, order = self.columns.flatten().sort(stable=True)
        rows = order.div(self.columns.shape[1], rounding_mode="floor")
        values = self.values.flatten()[order]
        if self.backend == "triton":
            from sparseformer.kernels.sparse_loss import products_kernel

            products_kernel.segment_sum(rows, columns, values, dense, out)
        else:
            segment_sum(rows, columns, values, dense, out)

    def add_column_sums(self, out: Tensor) -> None:
        """Add the sum of each column to out [V]; by segments too, because atomics vary."""
        ones = self.values.new_ones(1, 1).expand(self.columns.shape[0], 1)
        self.add_transposed_times(ones, out[:, None])


SparseMatrix = Entries | Padded


def sparse_entries(
    coefficients: Tensor, columns: Tensor | None, num_classes: int, first_row: int
) -> Entries | None:
    """Return the coefficients other than 0; None where a dense product is quicker.

    Args:
        coefficients: [n, m].
        columns: [n, m], their classes; None for all in order.
        num_classes: width of the matrix that they stand for.
        first_row: number of its first row.
    """
    present = coefficients != 0
    if int(present.sum()) * DENSE_COST_SHARE > coefficients.shape[0] * num_classes:
        return None
    rows, places = present.nonzero(as_tuple=True)
    classes = places if columns is None else columns[rows, places]
    return Entries((rows + first_row).int(), classes.int(), coefficients[rows, places])


def concatenate(parts: list[Entries], like: Tensor) -> Entries:
    """Return one matrix of the entries of all parts, which follow each other in row order."""
    if not parts:
        empty = torch.zeros(0, dtype=torch.int32, device=like.device)
        return Entries(empty, empty.clone(), like.new_zeros(0))
    return Entries(*(torch.cat(column) for column in zip(*parts, strict=True)))


def gather_scale(columns: Tensor, coefficients: Tensor, weight: Tensor) -> Tensor:
    """Return sum_j coefficients[i, j] weight[columns[i, j]], [n, D].

    Args:
        columns: [n, m], -1 in an empty slot.
        coefficients: [n, m], 0 in an empty slot.
        weight: [V, D].
    """
    counts = torch.full(columns.shape[:1], columns.shape[1], device=columns.device)
    return _bag(columns.flatten().clamp(min=0), coefficients.flatten(), counts, weight)


def segment_sum(rows: Tensor, columns: Tensor, values: Tensor, hidden: Tensor, out: Tensor) -> None:
    """Add the sum of values[e] hidden[rows[e]] over the entries e of each class to its row of out.

    Args:
        rows: [entries].
        columns: [entries], ascending; entries with the column -1 add nothing.
        values: [entries].
        hidden: [n, D].
        out: [V, D].
    """
    classes, counts = torch.unique_consecutive(columns, return_counts=True)
    hidden = hidden.to(values.dtype)
    for places, entries in _blocks(classes, counts, out.shape[1]):
        sums = _bag(rows[entries], values[entries], counts[places], hidden)
        out.index_add_(0, classes[places], sums.to(out.dtype))


def _blocks(classes: Tensor, counts: Tensor, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a few classes other than -1, and of their entries."""
    first = int((classes < 0).sum())
    size = max(BLOCK_NUMEL // max(width, 1), 1)
    entry = int(counts[:first].sum())
    for start in range(first, classes.numel(), size):
        stop = min(start + size, classes.numel())
        last = entry + int(counts[start:stop].sum())
        yield slice(start, stop), slice(entry, last)
        entry = last


def _bag(index: Tensor, values: Tensor, counts: Tensor, dense: Tensor) -> Tensor:
    """Return the weighted sums of rows of `dense`, counts[i] of them in sum i."""
    offsets = (counts.cumsum(0) - counts).to(index.dtype)
    if dense.dtype == values.dtype:
        return F.embedding_bag(index, dense, offsets, mode="sum", per_sample_weights=values)
    # Of a half-precision matrix only a few features at a time are widened.
    width = max(4 * BLOCK_NUMEL // max(dense.shape[0], 1), 16)
    parts = [
        F.embedding_bag(
            index, part.to(values.dtype), offsets, mode="sum", per_sample_weights=values
        )
        for part in dense.split(width, dim=1)
    ]
    return torch.cat(parts, 1)
