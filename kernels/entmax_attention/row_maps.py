"""The maps from a row of scores to probabilities that attention is written over."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen
from sparseformer.kernels.entmax.reference import alpha_term, probabilities
from sparseformer.kernels.entmax.rows import solve_rows

# From here on the short form of the alpha gradient is within about four times the rounding of the
# exact one, and it needs neither the series nor the choice between the two.
SHORT_FORM_ALPHA = 1.25


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
    backend: Chosen = "pytorch"

    def solve(self, scores: Tensor, /) -> tuple[Tensor, Tensor]:
        probs, maximum, threshold = solve_rows(scores, self.alpha, self.backend)
        return probs, torch.cat((maximum, threshold), dim=-1)

    def recompute(self, scores: Tensor, kept: Tensor, /) -> tuple[Tensor, Tensor]:
        maximum, threshold = kept.split(1, dim=-1)
        return probabilities(scores.sub_(maximum), threshold, self.alpha)

    def alpha_gradient(self, probs: Tensor, u: Tensor, centred: Tensor) -> Tensor:
        """Return sum_ij p_ij g_ij C_ij of each head, [Hq], where sum_j u_ij C_ij = 0.

        p g = (p - u) / eps**2 - p log(p) / eps, and the sum cancels u, so that
        p (1 - eps log p) / eps**2 will do. Near alpha = 1 that loses digits: there alpha_term
        takes its place.
        """
        alpha = torch.as_tensor(self.alpha)
        if bool((alpha < SHORT_FORM_ALPHA).any()):
            return alpha_term(probs, u, self.alpha).mul_(centred).sum((0, 2, 3))
        eps = alpha - 1.0
        log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log_()
        terms = log_probs.mul_(-eps).add_(1.0).mul_(probs).mul_(centred)
        return terms.sum((0, 2, 3)) / eps.square().flatten()


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
