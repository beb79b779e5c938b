"""What the evaluation of rows is asked for, and what it gives: losses, coefficients, statistics."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen

# Columns of the statistics before the ids: kept classes, target kept, target is the largest.
STATS_BEFORE_IDS = 3


@dataclass(frozen=True)
class Truncation:
    """Cross-entropy over the k largest logits, or over the smallest set that holds the mass p."""

    k: int | None = None
    p: float | None = None


class Request(NamedTuple):
    """What a caller wants of rows beside their losses, and what computes it."""

    gradient: bool = True  # the caller keeps the coefficients
    slope: bool = False  # d loss / d alpha
    stats: bool = False
    backend: Chosen = "pytorch"


class RowLoss(NamedTuple):
    """The loss of n rows, and its gradient as coefficients on m classes of each row."""

    loss: Tensor  # [n]
    coefficients: Tensor  # [n, m], d loss / d score
    columns: Tensor | None  # [n, m] classes of the coefficients; None: all V in order
    scores: Tensor  # [n, m]
    alpha_slope: Tensor | None = None  # [n], d loss / d alpha
    stats: Tensor | None = None  # [n, 3 + ids] int64


def row_stats(
    support: Tensor, scores: Tensor, columns: Tensor | None, target: Tensor, ids: Tensor | None
) -> Tensor:
    """Return per row: kept classes, whether the target is kept, and is the largest, and ids.

    Args:
        support: [n, m], whether the class of each score is kept.
        scores: [n, m]; the largest of the row is among them.
        columns: [n, m], ascending classes of the scores; None for all in order.
        target: [n], the class of each row.
        ids: [n, k] classes to report, -1 for none; None for that of the largest score.
    """
    own = target[:, None]
    best = scores.argmax(-1, keepdim=True)
    if columns is None:
        is_kept = support.gather(-1, own)
    else:
        is_kept = ((columns == own) & support).any(-1, keepdim=True)
        best = columns.gather(-1, best)
    # A row of -inf alone has no largest class.
    best = best.masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, -1)
    size = support.sum(-1, keepdim=True)
    return torch.cat([size, is_kept.long(), (best == own).long(), best if ids is None else ids], -1)
