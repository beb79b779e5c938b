"""The losses of rows of logits and their gradients, in closed form and plain PyTorch."""

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.entropy import entropy_slope, tsallis_entropy
from sparseformer.kernels.sparse_loss.mappings import (
    Mapping,
    centre,
    entmax,
    kept_softmax,
    softmax,
)
from sparseformer.kernels.sparse_loss.results import Request, RowLoss, Truncation, row_stats
from sparseformer.kernels.sparse_loss.selection import (
    candidates,
    reachable,
    select_top_k,
    top_k,
    top_p,
)
from sparseformer.kernels.sparse_loss.targets import Targets, inner


def truncated_rows(
    scores: Tensor, top: Tensor, targets: Targets, truncation: Truncation, request: Request
) -> RowLoss:
    """Return `sum_j m_j (logsumexp(z over the kept set) - z_j)` and its gradient.

    Args:
        scores: [n, V] without NaN and +inf; -inf is an excluded class.
        top: [n], the largest score of each row.
        targets: of the n rows.
        truncation: which logits the sum keeps.
        request: what is wanted beside the loss.
    """
    target_scores = None if targets.ids is None else _target_scores(scores, targets)
    if truncation.k is not None and target_scores is not None:
        kept, columns = select_top_k(request.backend, scores, truncation.k)
        return truncated_kept(kept, columns, top, targets, target_scores, request)
    mask = _kept(scores, top, truncation)
    mapping = kept_softmax(scores, top, mask)
    spread = targets.spread(scores, None, mask)
    result = _row_loss(mapping, scores, None, top, targets, spread, target_scores)
    if not request.stats:
        return result
    ids = None
    if truncation.k is not None:
        columns = top_k(scores, truncation.k)[1]
        ids = columns.masked_fill(~mask.gather(-1, columns), -1)
    return result._replace(stats=row_stats(mask, scores, None, targets.classes, ids))


def _kept(scores: Tensor, top: Tensor, truncation: Truncation) -> Tensor:
    """Return whether each score stays in the sum; those at -inf don't."""
    if truncation.p is not None:
        return top_p(scores, truncation.p, top)
    assert truncation.k is not None
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, top_k(scores, truncation.k)[1], True)
    return kept & (scores > -torch.inf)


def truncated_kept(
    kept: Tensor,
    columns: Tensor,
    top: Tensor,
    targets: Targets,
    target_scores: Tensor,
    request: Request,
) -> RowLoss:
    """Return the truncated loss of class ids from the scores [n, m] that the sum keeps."""
    mapping = softmax(kept, top)
    spread = targets.spread(kept, columns)
    result = _row_loss(mapping, kept, columns, top, targets, spread, target_scores)
    if not request.stats:
        return result
    mask = kept > -torch.inf
    ids = columns.masked_fill(~mask, -1)
    return result._replace(stats=row_stats(mask, kept, columns, targets.classes, ids))


def entmax_rows(
    scores: Tensor, top: Tensor, targets: Targets, alpha: float | Tensor, request: Request
) -> RowLoss:
    """Return the Fenchel-Young loss of alpha-entmax, its gradient, and its slope in alpha.

    Args:
        scores: [n, V] without NaN and +inf; -inf is an excluded class.
        top: [n], the largest score of each row.
        targets: of the n rows.
        alpha: a float, or a tensor of shape [n, 1] or [1, 1].
        request: what is wanted beside the loss.
    """
    narrow = request.backend == "pytorch" and _narrow(scores, alpha)
    found = candidates(scores, reachable(top, alpha)) if narrow else None
    plain = targets.ids is not None and targets.smoothing == 0.0
    if found is not None and plain:
        own = _target_scores(scores, targets)
        return entmax_kept(*found, top, targets, own, alpha, request)
    mapping = entmax(scores if found is None else found[0], top, alpha, request)
    if found is not None:
        mapping = mapping._replace(probs=_scatter(mapping.probs, found[1], scores))
    # Before the loss overwrites the probabilities.
    support = mapping.probs > 0 if request.stats else None
    target_scores = None if targets.ids is None else _target_scores(scores, targets)
    spread = targets.spread(scores, None)
    result = _row_loss(mapping, scores, None, top, targets, spread, target_scores)
    if support is not None:
        stats = row_stats(support, scores, None, targets.classes, None)
        result = result._replace(stats=stats)
    return result if targets.ids is not None else _less_entropy(result, top, targets, alpha)


def entmax_kept(
    kept: Tensor,
    columns: Tensor,
    top: Tensor,
    targets: Targets,
    target_scores: Tensor,
    alpha: float | Tensor,
    request: Request,
) -> RowLoss:
    """Return the entmax loss of class ids from scores [n, m] that hold every row's support."""
    mapping = entmax(kept, top, alpha, request)
    result = _row_loss(mapping, kept, columns, top, targets, None, target_scores)
    if not request.stats:
        return result
    stats = row_stats(mapping.probs > 0, kept, columns, targets.classes, None)
    return result._replace(stats=stats)


def _narrow(scores: Tensor, alpha: float | Tensor) -> bool:
    """Return whether looking for candidates first can pay off."""
    return scores.shape[-1] >= 256 and (isinstance(alpha, Tensor) or alpha > 1.0)


def _target_scores(scores: Tensor, targets: Targets) -> Tensor:
    assert targets.ids is not None
    return scores.gather(-1, targets.ids[:, None])[:, 0]


def _scatter(values: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    # Padding points at column 0 with value 0, so adding leaves it in place.
    return torch.zeros_like(like).scatter_add_(-1, columns, values)


def _row_loss(
    mapping: Mapping,
    scores: Tensor,
    columns: Tensor | None,
    top: Tensor,
    targets: Targets,
    spread: Tensor | None,
    target_scores: Tensor | None,
) -> RowLoss:
    """Return `M A(z) - <m, z>` and `M p - m`, with M the sum of the mass m."""
    targets = targets.without(top == -torch.inf)
    total, middle = targets.total(spread), centre(top)
    probs = mapping.probs if targets.sums_to_one else mapping.probs * total[:, None]
    loss = total * mapping.log_partition
    slope = None if mapping.entropy_slope is None else total * mapping.entropy_slope
    if spread is not None:
        loss = loss - inner(spread, scores - middle).sum(-1)
        probs = probs - spread
    if targets.ids is None:
        loss = loss - inner(targets.mass, scores - middle).sum(-1)
        return RowLoss(loss, probs - targets.mass, None, scores, slope)
    assert target_scores is not None
    loss = loss - inner(targets.mass, target_scores - middle[:, 0])
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
