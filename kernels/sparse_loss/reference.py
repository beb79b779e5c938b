"""The losses of rows of logits and their gradients, in closed form and plain PyTorch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import entmax_rows as entmax_probs
from sparseformer.kernels.entmax.reference import probabilities, solve_threshold
from sparseformer.kernels.sparse_loss.entropy import entropy_slope, tsallis_entropy
from sparseformer.kernels.sparse_loss.selection import candidates, reachable, top_k, top_p
from sparseformer.kernels.sparse_loss.targets import Targets, inner


@dataclass(frozen=True)
class Truncation:
    """Cross-entropy over the k largest logits, or over the smallest set that holds the mass p."""

    k: int | None = None
    p: float | None = None


class RowLoss(NamedTuple):
    """The loss of n rows, and its gradient as coefficients on m classes of each row."""

    loss: Tensor  # [n]
    coefficients: Tensor  # [n, m], d loss / d score
    columns: Tensor | None  # [n, m] classes of the coefficients; None: all V in order
    scores: Tensor  # [n, m]
    alpha_slope: Tensor | None = None  # [n], d loss / d alpha


class _Mapping(NamedTuple):
    """What a row is mapped to: probabilities p = dA/dz, and the log-partition A of z - max(z)."""

    probs: Tensor  # [n, m]
    log_partition: Tensor  # [n]
    entropy_slope: Tensor | None = None  # [n], dA/dalpha


def truncated_rows(
    scores: Tensor, top: Tensor, targets: Targets, truncation: Truncation
) -> RowLoss:
    """Return `sum_j m_j (logsumexp(z over the kept set) - z_j)` and its gradient.

    Args:
        scores: [n, V] without NaN and +inf; -inf is an excluded class.
        top: [n], the largest score of each row.
        targets: of the n rows.
        truncation: which logits the sum keeps.
    """
    target_scores = None if targets.ids is None else _target_scores(scores, targets)
    if truncation.k is not None and target_scores is not None:
        kept, columns = top_k(scores, truncation.k)
        return truncated_kept(kept, columns, top, targets, target_scores)
    kept = _kept(scores, top, truncation)
    mapping = _kept_softmax(scores, top, kept)
    spread = targets.spread(scores, None, kept)
    return _row_loss(mapping, scores, None, top, targets, spread, target_scores)


def _kept(scores: Tensor, top: Tensor, truncation: Truncation) -> Tensor:
    """Return whether each score stays in the sum; those at -inf don't."""
    if truncation.p is not None:
        return top_p(scores, truncation.p, top)
    assert truncation.k is not None
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, top_k(scores, truncation.k)[1], True)
    return kept & (scores > -torch.inf)


def truncated_kept(
    kept: Tensor, columns: Tensor, top: Tensor, targets: Targets, target_scores: Tensor
) -> RowLoss:
    """Return the truncated loss of class ids from the scores [n, m] that the sum keeps."""
    mapping = _softmax(kept, top)
    spread = targets.spread(kept, columns)
    return _row_loss(mapping, kept, columns, top, targets, spread, target_scores)


def entmax_rows(
    scores: Tensor, top: Tensor, targets: Targets, alpha: float | Tensor, needs_slope: bool = False
) -> RowLoss:
    """Return the Fenchel-Young loss of alpha-entmax, its gradient, and its slope in alpha.

    Args:
        scores: [n, V] without NaN and +inf; -inf is an excluded class.
        top: [n], the largest score of each row.
        targets: of the n rows.
        alpha: a float, or a tensor of shape [n, 1] or [1, 1].
        needs_slope: also return d loss / d alpha.
    """
    found = candidates(scores, reachable(top, alpha)) if _narrow(scores, alpha) else None
    plain = targets.ids is not None and targets.smoothing == 0.0
    if found is not None and plain:
        own = _target_scores(scores, targets)
        return entmax_kept(*found, top, targets, own, alpha, needs_slope)
    mapping = _entmax(scores if found is None else found[0], top, alpha, needs_slope)
    if found is not None:
        mapping = mapping._replace(probs=_scatter(mapping.probs, found[1], scores))
    target_scores = None if targets.ids is None else _target_scores(scores, targets)
    spread = targets.spread(scores, None)
    result = _row_loss(mapping, scores, None, top, targets, spread, target_scores)
    return result if targets.ids is not None else _less_entropy(result, top, targets, alpha)


def entmax_kept(
    kept: Tensor,
    columns: Tensor,
    top: Tensor,
    targets: Targets,
    target_scores: Tensor,
    alpha: float | Tensor,
    needs_slope: bool = False,
) -> RowLoss:
    """Return the entmax loss of class ids from scores [n, m] that hold every row's support."""
    mapping = _entmax(kept, top, alpha, needs_slope)
    return _row_loss(mapping, kept, columns, top, targets, None, target_scores)


def _narrow(scores: Tensor, alpha: float | Tensor) -> bool:
    """Return whether looking for candidates first can pay off."""
    return scores.shape[-1] >= 256 and (isinstance(alpha, Tensor) or alpha > 1.0)


def _centre(top: Tensor) -> Tensor:
    """Return the row maximum as a column to subtract; 0 where a row has no class at all."""
    return top.masked_fill(top == -torch.inf, 0.0)[:, None]


def _target_scores(scores: Tensor, targets: Targets) -> Tensor:
    assert targets.ids is not None
    return scores.gather(-1, targets.ids[:, None])[:, 0]


def _scatter(values: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    # Padding points at column 0 with value 0, so adding leaves it in place.
    return torch.zeros_like(like).scatter_add_(-1, columns, values)


def _softmax(scores: Tensor, top: Tensor) -> _Mapping:
    probs = scores.softmax(-1)
    if bool((top == -torch.inf).any()):
        probs.nan_to_num_(nan=0.0)
        return _Mapping(probs, -probs.amax(-1).masked_fill_(top == -torch.inf, 1.0).log())
    # The largest probability is exp(0) / sum exp(z - max z).
    return _Mapping(probs, probs.amax(-1).log_().neg_())


def _kept_softmax(scores: Tensor, top: Tensor, kept: Tensor) -> _Mapping:
    # Not a softmax with -inf elsewhere, because exp takes several times as long there.
    probs = (scores - _centre(top)).exp_().mul_(kept)
    total = probs.sum(-1).masked_fill_(top == -torch.inf, 1.0)
    return _Mapping(probs.div_(total[:, None]), total.log())


def _entmax(kept: Tensor, top: Tensor, alpha: float | Tensor, needs_slope: bool) -> _Mapping:
    """Map rows by entmax; with p, w and t as in kernels/entmax, `A = t + (sum p w - 1) / alpha`.

    A is the minimum over t of that convex function, so an error of t enters it squared.
    """
    if isinstance(alpha, float) and alpha == 1.0:
        return _softmax(kept, top)
    centred = kept - _centre(top)
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
    slope = entropy_slope(probs, log_partition - expected, alpha) if needs_slope else None
    return _Mapping(probs, log_partition, slope)


def _row_loss(
    mapping: _Mapping,
    scores: Tensor,
    columns: Tensor | None,
    top: Tensor,
    targets: Targets,
    spread: Tensor | None,
    target_scores: Tensor | None,
) -> RowLoss:
    """Return `M A(z) - <m, z>` and `M p - m`, with M the sum of the mass m."""
    targets = targets.without(top == -torch.inf)
    total, centre = targets.total(spread), _centre(top)
    probs = mapping.probs if targets.sums_to_one else mapping.probs * total[:, None]
    loss = total * mapping.log_partition
    slope = None if mapping.entropy_slope is None else total * mapping.entropy_slope
    if spread is not None:
        loss = loss - inner(spread, scores - centre).sum(-1)
        probs = probs - spread
    if targets.ids is None:
        loss = loss - inner(targets.mass, scores - centre).sum(-1)
        return RowLoss(loss, probs - targets.mass, None, scores, slope)
    assert target_scores is not None
    loss = loss - inner(targets.mass, target_scores - centre[:, 0])
    ids, mass = targets.ids[:, None], targets.mass[:, None]
    if columns is None:
        return RowLoss(loss, probs.scatter_add_(-1, ids, -mass), None, scores, slope)
    # The target joins its class where that is kept, and else gets a column of its own.
    own = (columns == ids) & (scores > -torch.inf)
    alone = torch.where(own.any(-1, keepdim=True), 0.0, -mass)
    coefficients = torch.cat([probs - own * mass, alone], -1)
    columns, scores = torch.cat([columns, ids], -1), torch.cat([scores, target_scores[:, None]], -1)
    return RowLoss(loss, coefficients, columns, scores, slope)


def _less_entropy(result: RowLoss, top: Tensor, targets: Targets, alpha: float | Tensor) -> RowLoss:
    """Subtract the entropy of target distributions, which makes the loss 0 at its minimum."""
    mass = targets.without(top == -torch.inf).mass
    share = mass.sum(-1)
    q = mass / torch.where(share > 0, share, 1.0)[:, None]
    entropy = tsallis_entropy(q, alpha)
    loss = result.loss - share * entropy
    if result.alpha_slope is None:
        return result._replace(loss=loss)
    slope = result.alpha_slope - share * entropy_slope(q, entropy, alpha)
    return result._replace(loss=loss, alpha_slope=slope)
