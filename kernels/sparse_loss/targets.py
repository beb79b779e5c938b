"""What each row of a batch should predict, and how much each class counts."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """The targets of the rows that count, as a mass on classes.

    A row's loss is `sum_j m_j (A(z) - z_j)` less the entropy of a distribution, where A is the
    log-partition of the loss and m the mass: class weights are in it, and label smoothing, which
    takes `smoothing` off the target and spreads it evenly over the classes that the loss sees.

    Attributes:
        mass: [n] on the class `ids`; or [n, V] when targets are distributions.
        ids: [n] class of each row, or None for distributions.
        smoothing: the share that is spread, in [0, 1].
        class_weight: [V], or None for ones.
    """

    mass: Tensor
    ids: Tensor | None = None
    smoothing: float = 0.0
    class_weight: Tensor | None = None

    @classmethod
    def from_ids(
        cls, ids: Tensor, smoothing: float, weight: Tensor | None, like: Tensor
    ) -> "Targets":
        """Build the targets of class ids [n] in the dtype of `like`."""
        kept = 1.0 - smoothing
        mass = like.new_full(ids.shape, kept) if weight is None else kept * weight[ids]
        return cls(mass, ids, smoothing, weight)

    @classmethod
    def from_distributions(cls, q: Tensor, smoothing: float, weight: Tensor | None) -> "Targets":
        """Build the targets of distributions [n, V]."""
        mass = (1.0 - smoothing) * (q if weight is None else q * weight)
        return cls(mass, None, smoothing, weight)

    def slice(self, start: int, stop: int) -> "Targets":
        """Return the targets of rows start to stop."""
        ids = None if self.ids is None else self.ids[start:stop]
        return replace(self, mass=self.mass[start:stop], ids=ids)

    def without(self, empty: Tensor) -> "Targets":
        """Return the targets with no mass in the rows [n] where `empty` is set."""
        shape = (-1,) + (1,) * (self.mass.ndim - 1)
        return replace(self, mass=self.mass.masked_fill(empty.view(shape), 0.0))

    @property
    def classes(self) -> Tensor:
        """The class of each row [n]; of a distribution, the one with the largest mass."""
        return self.mass.argmax(-1) if self.ids is None else self.ids

    @property
    def sums_to_one(self) -> bool:
        """Whether every row's mass, smoothing included, is exactly one."""
        return self.ids is not None and self.class_weight is None

    def total(self, spread: Tensor | None) -> Tensor:
        """Return each row's mass [n], with that of `spread`."""
        if self.sums_to_one:
            return torch.ones_like(self.mass)
        total = self.mass if self.ids is not None else self.mass.sum(-1)
        return total if spread is None else total + spread.sum(-1)

    def spread(
        self, scores: Tensor, columns: Tensor | None, kept: Tensor | None = None
    ) -> Tensor | None:
        """Return the smoothing mass on each of the scores [n, m].

        It is even over what is kept, and without `kept` over all but the classes at -inf.
        """
        if self.smoothing == 0.0:
            return None
        # On a GPU the question would wait for the device.
        ask = kept is None and scores.numel() > 0 and not scores.is_cuda
        if ask and bool(scores.amin() > -torch.inf):
            spread = scores.new_full((), self.smoothing / scores.shape[-1]).expand(scores.shape)
        else:
            present = scores > -torch.inf if kept is None else kept
            count = present.sum(-1, keepdim=True, dtype=scores.dtype).clamp_(min=1.0)
            spread = present * (self.smoothing / count)
        if self.class_weight is None:
            return spread
        return spread * (self.class_weight if columns is None else self.class_weight[columns])


def inner(mass: Tensor, scores: Tensor) -> Tensor:
    """Return mass * scores, where no mass on a class at -inf is 0 and not NaN."""
    product = mass * scores
    return product.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
