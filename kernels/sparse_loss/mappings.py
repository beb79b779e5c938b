"""The maps from scores to probabilities that the losses are built on, with their log-partitions."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import entmax_rows as entmax_probs
from sparseformer.kernels.entmax.reference import probabilities, solve_threshold
from sparseformer.kernels.entmax.rows import entmax_rows as entmax_on
from sparseformer.kernels.sparse_loss.entropy import entropy_slope, tsallis_entropy
from sparseformer.kernels.sparse_loss.results import Request


class Mapping(NamedTuple):
    """What a row is mapped to: probabilities p = dA/dz, and the log-partition A of z - max(z)."""

    probs: Tensor  # [n, m]
    log_partition: Tensor  # [n]
    entropy_slope: Tensor | None = None  # [n], dA/dalpha


def centre(top: Tensor) -> Tensor:
    """Return the row maximum as a column to subtract; 0 where a row has no class at all."""
    return top.masked_fill(top == -torch.inf, 0.0)[:, None]


def softmax(scores: Tensor, top: Tensor) -> Mapping:
    """Map rows that hold their maximum `top` by softmax; a row of -inf to zeros."""
    probs = scores.softmax(-1)
    empty = top == -torch.inf
    # On a GPU the question would wait for the device.
    if scores.is_cuda or bool(empty.any()):
        probs.masked_fill_(empty[:, None], 0.0)
        return Mapping(probs, -probs.amax(-1).masked_fill_(empty, 1.0).log())
    # The largest probability is exp(0) / sum exp(z - max z).
    return Mapping(probs, probs.amax(-1).log_().neg_())


def kept_softmax(scores: Tensor, top: Tensor, kept: Tensor) -> Mapping:
    """Map the scores that are kept by softmax, the others to 0."""
    # Not a softmax with -inf elsewhere, because exp takes several times as long there.
    probs = (scores - centre(top)).exp_().mul_(kept)
    total = probs.sum(-1).masked_fill_(top == -torch.inf, 1.0)
    return Mapping(probs.div_(total[:, None]), total.log())


def entmax(kept: Tensor, top: Tensor, alpha: float | Tensor, request: Request) -> Mapping:
    """Map rows by entmax; with p, w and t as in kernels/entmax, `A = t + (sum p w - 1) / alpha`.

    A is the minimum over t of that convex function, so an error of t enters it squared.
    """
    if isinstance(alpha, float) and alpha == 1.0:
        return softmax(kept, top)
    centred = kept - centre(top)
    if request.backend == "triton":
        return _entmax_by_entropy(centred, top, alpha, request)
    t = solve_threshold(centred, alpha)
    # Above 2, p is too steep a function of t for t's rounding.
    steep = bool((alpha > 2.0).any()) if isinstance(alpha, Tensor) else alpha > 2.0
    probs = entmax_probs(centred, alpha) if steep else probabilities(centred, t, alpha)[0]
    total = probs.sum(-1)
    # nansum: an excluded class is 0 * -inf here.
    expected = (probs * centred).nansum(-1)
    t = t.squeeze(-1)
    row_alpha = alpha.squeeze(-1) if isinstance(alpha, Tensor) else alpha
    log_partition = t + (total - 1.0 + (row_alpha - 1.0) * (expected - t * total)) / row_alpha
    log_partition = log_partition.masked_fill(top == -torch.inf, 0.0)
    slope = entropy_slope(probs, log_partition - expected, alpha) if request.slope else None
    return Mapping(probs, log_partition, slope)


def _entmax_by_entropy(
    centred: Tensor, top: Tensor, alpha: float | Tensor, request: Request
) -> Mapping:
    """Map rows where only p is at hand: `A = <p, z> + H(p)`, which p maximises on the simplex."""
    probs = entmax_on(centred, alpha, request.backend)
    # An excluded class is 0 * -inf; a NaN among the probabilities has to stay.
    expected = (probs * centred.masked_fill(centred == -torch.inf, 0.0)).sum(-1)
    entropy = tsallis_entropy(probs, alpha).masked_fill(top == -torch.inf, 0.0)
    slope = entropy_slope(probs, entropy, alpha) if request.slope else None
    return Mapping(probs, expected + entropy, slope)
