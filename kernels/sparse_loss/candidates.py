"""What may be in the support of entmax, gathered tile of classes by tile of classes."""

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import solve_threshold
from sparseformer.kernels.sparse_loss.mappings import centre
from sparseformer.kernels.sparse_loss.selection import below, pad_rows, reachable

# The floor stays lower than the threshold by this share of its distance from the maximum, which
# is far more than the solver's rounding.
_MARGIN = 1e-3


class Candidates:
    """The scores of n rows that may have a probability above 0, given the classes so far.

    The threshold of a row only rises when it gets more classes. So the threshold of the candidates
    bounds it from below, as max - 1 / (alpha - 1) does, and more closely.

    Args:
        top: [n], -inf: the maximum of each row over no class.
        alpha: a float above 1, or a tensor [n, 1] or [1, 1].
        limit: how many candidates are too many to be worth keeping apart.
        padded_limit: how many values `padded` may return.
    """

    def __init__(self, top: Tensor, alpha: float | Tensor, limit: int, padded_limit: int) -> None:
        self._top = top
        self._alpha, self._limit, self._padded_limit = alpha, limit, padded_limit
        self._floor = top[:, None]
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._count = 0

    def add(self, scores: Tensor, top: Tensor, first_class: int) -> bool:
        """Take what counts of scores [n, m] from a class on; return False if it gets too much.

        `top` is the maximum over all classes so far, these included.
        """
        is_first, self._top = not self._parts, top
        self._raise_floor(reachable(top, self._alpha))
        rows, places = (scores > self._floor).nonzero(as_tuple=True)
        self._parts.append((rows, places + first_class, scores[rows, places]))
        self._count += rows.numel()
        if not is_first and self._count <= self._limit:
            return True
        return self._tighten()

    def padded(self) -> tuple[Tensor, Tensor] | None:
        """Return the candidates by row, [n, widest] with -inf at the end, and their classes.

        None if one row is so wide that this would take too much memory.
        """
        rows, columns, values = self._merge()
        num_rows = self._top.shape[0]
        widest = int(torch.bincount(rows, minlength=num_rows).max())
        if widest * num_rows > self._padded_limit:
            return None
        return pad_rows(rows, columns, values, num_rows)

    def _tighten(self) -> bool:
        """Raise the floor to the threshold of the candidates, and drop those below it."""
        padded = self.padded()
        if padded is None:
            return False
        t = solve_threshold(padded[0] - centre(self._top), self._alpha)
        depth = 1.0 / (self._alpha - 1.0) - t
        self._raise_floor(below(self._top[:, None], (1.0 + _MARGIN) * depth))
        self._merge()
        return self._count <= self._limit

    def _raise_floor(self, floor: Tensor) -> None:
        self._floor = torch.maximum(self._floor, floor)

    def _merge(self) -> tuple[Tensor, Tensor, Tensor]:
        """Drop what the floor has passed, and return the rest in order of row and class."""
        rows, columns, values = (torch.cat(part) for part in zip(*self._parts, strict=True))
        inside = (values > self._floor[rows, 0]).nonzero()[:, 0]
        inside = inside[rows[inside].argsort(stable=True)]
        merged = rows[inside], columns[inside], values[inside]
        self._parts, self._count = [merged], inside.numel()
        return merged
