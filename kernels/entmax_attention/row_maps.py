"""The maps from a row of scores to probabilities that attention is written over."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import alpha_term, probabilities, solve_threshold


class RowMap(Protocol):
    """A map with the Jacobian diag(u) - u u^T / sum(u) on every row.

    u is p ** (2 - alpha) for entmax and p itself for a softmax over a kept set. Scores of -inf
    are excluded, and a row of nothing else has p = u = 0. The scores may be overwritten; those
    of -inf stay.
    """

    def solve(self, scores: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return p and what the backward pass wants to keep of each row."""

    def recompute(self, scores: Tensor, kept: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return p and u from the scores and what solve kept."""


@dataclass(frozen=True)
class Entmax:
    """alpha-entmax along the last dimension; alpha is a float or a tensor [1, Hq, 1, 1]."""

    alpha: float | Tensor

    def solve(self, scores: Tensor, /) -> tuple[Tensor, Tensor]:
        # Relative to the row's maximum, rounding of t does not grow with the size of the scores.
        maximum = scores.amax(-1, keepdim=True)
        maximum.masked_fill_(maximum == -math.inf, 0.0)
        threshold = solve_threshold(scores.sub_(maximum), self.alpha)
        probs, _ = probabilities(scores, threshold, self.alpha)
        return probs, torch.cat((maximum, threshold), dim=-1)

    def recompute(self, scores: Tensor, kept: Tensor, /) -> tuple[Tensor, Tensor]:
        maximum, threshold = kept.split(1, dim=-1)
        return probabilities(scores.sub_(maximum), threshold, self.alpha)

    def alpha_gradient(self, probs: Tensor, u: Tensor, centred: Tensor) -> Tensor:
        """Return sum_ij p_ij g_ij (dP_ij - delta_i) of each head, [Hq]."""
        return alpha_term(probs, u, self.alpha).mul_(centred).sum((0, 2, 3))


@dataclass(frozen=True)
class KeptSoftmax:
    """Softmax over the part of each row that `probabilities` keeps, whose choice is a constant."""

    probabilities: Callable[[Tensor], Tensor]

    def solve(self, scores: Tensor, /) -> tuple[Tensor, Tensor]:
        return self.probabilities(scores), scores.new_empty(0)

    def recompute(self, scores: Tensor, _kept: Tensor, /) -> tuple[Tensor, Tensor]:
        probs = self.probabilities(scores)
        return probs, probs


def softmax_rows(scores: Tensor) -> Tensor:
    """Return the softmax of each row, and zeros for a row of -inf."""
    probs = torch.softmax(scores, dim=-1)
    # Such a row gives NaN in every column; so does a row that holds a NaN, which stays.
    if bool(probs[..., 0].isnan().any()):
        probs.masked_fill_((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return probs
