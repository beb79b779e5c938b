"""Products of a sparse [tokens, classes] matrix with the hidden states and the output matrix."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A gathered multiply-add costs about eight of a dense product's (measured on one core, widths of
# 128 to 512), so a matrix with more entries than an eighth is multiplied as a dense one.
DENSE_COST_SHARE = 8


class SparseMatrix(NamedTuple):
    """Entries in row order, several of one place being added."""

    rows: Tensor  # [entries] int32
    columns: Tensor  # [entries] int32
    values: Tensor  # [entries]

    def times(self, dense: Tensor, num_rows: int) -> Tensor:
        """Return the product [num_rows, D] with dense [V, D], summed in the dtype of `values`."""
        counts = torch.bincount(self.rows, minlength=num_rows)
        return _bag(self.columns, self.values, counts, dense)

    def add_transposed_times(self, dense: Tensor, out: Tensor) -> None:
        """Add the transposed matrix times dense [n, D] to out [V, D], class by class in order."""
        order = self.columns.argsort(stable=True)
        classes, counts = torch.unique_consecutive(self.columns[order], return_counts=True)
        out.index_add_(0, classes, _bag(self.rows[order], self.values[order], counts, dense))

    def add_column_sums(self, out: Tensor) -> None:
        """Add the sum of each column to out [V]."""
        out.index_add_(0, self.columns, self.values)


def sparse_matrix(
    coefficients: Tensor, columns: Tensor | None, num_classes: int, first_row: int
) -> SparseMatrix | None:
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
    return SparseMatrix((rows + first_row).int(), classes.int(), coefficients[rows, places])


def concatenate(parts: list[SparseMatrix], like: Tensor) -> SparseMatrix:
    """Return one matrix of the entries of all parts, which follow each other in row order."""
    if not parts:
        empty = torch.zeros(0, dtype=torch.int32, device=like.device)
        return SparseMatrix(empty, empty, like.new_zeros(0))
    return SparseMatrix(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _bag(index: Tensor, values: Tensor, counts: Tensor, dense: Tensor) -> Tensor:
    """Return the weighted sums of rows of `dense`, counts[i] of them in sum i."""
    offsets = (counts.cumsum(0) - counts).to(index.dtype)
    dense = dense.to(values.dtype)
    return F.embedding_bag(index, dense, offsets, mode="sum", per_sample_weights=values)
