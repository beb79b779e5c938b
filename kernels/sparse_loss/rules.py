"""One loss as a value: which rows-to-loss map, its settings, and what alpha is for which rows."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen, choose_backend
from sparseformer.kernels.sparse_loss.reference import entmax_rows, truncated_rows
from sparseformer.kernels.sparse_loss.results import Request, RowLoss, Truncation
from sparseformer.kernels.sparse_loss.targets import Targets

# The settings of a Rule in the schemas of the operators, in the order of its fields.
RULE_SCHEMA = (
    "str name, int? k, float? top_p, float? fixed_alpha, float label_smoothing, int ignore_index, "
    "str backend, float? softcap, int? chunk_size"
)


@dataclass(frozen=True)
class Rule:
    """What an operator needs to know beside its tensors.

    Attributes:
        name: the public function, for error messages.
        k: logits that a truncated cross-entropy keeps, or None.
        top_p: softmax mass that a truncated cross-entropy keeps, or None.
        alpha: of an entmax loss; None where it is a tensor, and for a truncated cross-entropy.
        label_smoothing: share of the target's mass that is spread.
        ignore_index: class id of rows that don't count.
        backend: "auto" or a Chosen backend; `on` chooses.
        softcap: bound of the logits of a linear loss, or None.
        chunk_size: tokens of a tile of a linear loss, or None.
        shape: leading shape of the batch, for the positions in error messages.
        refuses_logits: whether NaN and +inf raise, on the CPU.
    """

    name: str
    k: int | None = None
    top_p: float | None = None
    alpha: float | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100
    backend: str = "auto"
    softcap: float | None = None
    chunk_size: int | None = None
    shape: tuple[int, ...] = ()
    refuses_logits: bool = True

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of RULE_SCHEMA; `Rule(*settings)` is this rule without what follows."""
        return (
            self.name,
            self.k,
            self.top_p,
            self.alpha,
            self.label_smoothing,
            self.ignore_index,
            self.backend,
            self.softcap,
            self.chunk_size,
        )

    def on(self, tensor: Tensor) -> "Rule":
        """Return the rule with its backend chosen, for a batch [..., features or classes]."""
        backend = choose_backend(self.name, self.backend, tensor)
        return replace(self, backend=backend, shape=tuple(tensor.shape[:-1]))

    def request(self, gradient: bool, slope: bool, stats: bool) -> Request:
        """Return a request to this rule's backend."""
        assert self.backend in ("pytorch", "triton"), self.backend
        chosen: Chosen = "triton" if self.backend == "triton" else "pytorch"
        return Request(gradient, slope, stats, chosen)

    @property
    def truncation(self) -> Truncation | None:
        """The kept logits of a truncated cross-entropy; None for entmax losses."""
        if self.k is None and self.top_p is None:
            return None
        return Truncation(self.k, self.top_p)

    @property
    def is_dense(self) -> bool:
        """Whether the gradient is other than 0 for every class, whatever the logits are."""
        return self.truncation is None and (self.alpha == 1.0 or self.label_smoothing > 0.0)

    def evaluate(
        self,
        scores: Tensor,
        top: Tensor,
        targets: Targets,
        alpha: float | Tensor,
        request: Request,
    ) -> RowLoss:
        """Return the loss of rows of scores [n, V] and its gradient."""
        if self.truncation is not None:
            return truncated_rows(scores, top, targets, self.truncation, request)
        return entmax_rows(scores, top, targets, alpha, request)

    def targets(
        self, target: Tensor, weight: Tensor | None, rows: Tensor | None, like: Tensor
    ) -> Targets:
        """Return the targets of the chosen rows, in the dtype that `like` has."""
        chosen = target if rows is None else target[rows]
        weight = None if weight is None else weight.to(like.dtype)
        if target.is_floating_point():
            chosen = chosen.to(like.dtype)
            return Targets.from_distributions(chosen, self.label_smoothing, weight)
        return Targets.from_ids(chosen, self.label_smoothing, weight, like)

    def alpha_of(
        self, alpha: Tensor | None, rows: Tensor | None, start: int, stop: int
    ) -> float | Tensor:
        """Return alpha of chosen rows start to stop: a float, or a tensor [1, 1] or [n, 1]."""
        if alpha is None:
            return 1.0 if self.alpha is None else self.alpha
        if alpha.ndim == 0:
            return alpha.view(1, 1)
        return (alpha if rows is None else alpha[rows])[start:stop, None]

    def refuse_bad_logits(
        self,
        scores: Tensor,
        top: Tensor,
        rows: Tensor | None,
        source: str,
        first_row: int = 0,
        first_class: int = 0,
    ) -> None:
        """Raise for the first row whose maximum is NaN or +inf; not on a GPU, where it would wait.

        Args:
            scores: [n, m] logits of the chosen rows from first_row, classes from first_class.
            top: [n] row maxima.
            rows: places of the chosen rows in the flat batch; None where all are chosen.
            source: where such a value may come from.
            first_row: number of chosen rows before these.
            first_class: number of classes before these.
        """
        if scores.is_cuda or not self.refuses_logits:
            return
        bad = ~(top < torch.inf)
        if not bool(bad.any()):
            return
        row = int(bad.nonzero()[0, 0])
        column = int((~(scores[row] < torch.inf)).nonzero()[0, 0])
        index = first_row + row if rows is None else int(rows[first_row + row])
        raise ValueError(
            f"{self.name}: the logit at position {unravel(index, self.shape)}, class "
            f"{first_class + column}, is {float(scores[row, column])}, but logits are finite or "
            f"-inf (an excluded class); look for the cause in {source}."
        )


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the position in `shape` of an index into the flat batch."""
    position: list[int] = []
    for size in reversed(shape):
        position.append(index % size)
        index //= size
    return tuple(reversed(position))
