"""What an operator does first: it refuses bad values and finds the rows that count."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.sparse_loss.rules import Rule


class Counted(NamedTuple):
    """The targets of a flat batch of N rows, and which of them count."""

    target: Tensor  # [N] int64 class ids, or [N, V] distributions
    rows: Tensor | None  # [n] places of the rows that count; None where all do
    denominator: Tensor  # [], what the mean divides by


def count_rows(
    rule: Rule,
    target: Tensor,
    num_classes: int,
    weight: Tensor | None,
    alpha: Tensor | None,
    dtype: torch.dtype,
) -> Counted:
    """Check the values of the targets, class weights and alphas, and return what counts.

    The device is read once, and a second time for the rows where some don't count.
    """
    is_floating = target.is_floating_point()
    counted = None if is_floating else target != rule.ignore_index
    bad_target = _bad_rows(target) if counted is None else _bad_ids(target, counted, num_classes)
    questions = [bad_target.any()]
    if counted is not None:
        questions.append(counted.all())
    if weight is not None:
        questions.append(~(weight >= 0).all())
    if alpha is not None:
        questions.append(~((alpha >= 1.0) & (alpha < torch.inf)).all())
    answers = torch.stack(questions).tolist() if target.is_cuda else [bool(q) for q in questions]
    if answers[0]:
        _refuse_target(rule, target, bad_target, num_classes)
    some_ignored = counted is not None and not answers[1]
    others = answers[1:] if counted is None else answers[2:]
    if weight is not None and others[0]:
        raise ValueError(
            f"{rule.name}: weight has an entry below 0 or NaN, but weights are 0 or more."
        )
    if alpha is not None and others[-1]:
        _refuse_alpha(rule.name, alpha)
    flat = target.reshape(-1, num_classes) if is_floating else target.reshape(-1).long()
    rows = counted.reshape(-1).nonzero()[:, 0] if counted is not None and some_ignored else None
    return Counted(flat, rows, _denominator(flat, rows, weight, dtype))


def _denominator(
    target: Tensor, rows: Tensor | None, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the number of rows that count, or the weight of their classes; 1 where it is 0."""
    ids = target if rows is None else target[rows]
    if weight is None or target.is_floating_point():
        return torch.full((), max(ids.shape[0], 1), dtype=dtype, device=target.device)
    total = weight.to(dtype)[ids].sum()
    return torch.where(total > 0, total, 1.0)


def _bad_ids(target: Tensor, counted: Tensor, num_classes: int) -> Tensor:
    return ((target < 0) | (target >= num_classes)) & counted


def _bad_rows(target: Tensor) -> Tensor:
    """Return which distributions are off the simplex."""
    tolerance = 1e-3 if target.element_size() >= 4 else 5e-2
    return ~((_sums(target) - 1.0).abs() <= tolerance) | (target < 0).any(-1)


def _sums(target: Tensor) -> Tensor:
    return target.sum(-1, dtype=torch.promote_types(target.dtype, torch.float32))


def _refuse_target(rule: Rule, target: Tensor, bad: Tensor, num_classes: int) -> None:
    place = tuple(bad.nonzero()[0].tolist())
    if target.is_floating_point():
        raise ValueError(
            f"{rule.name}: target at position {place} has the sum {float(_sums(target)[place]):.6g}"
            " or an entry below 0, but it must be a distribution; divide a multi-hot row by its "
            "sum."
        )
    raise ValueError(
        f"{rule.name}: target at position {place} is {int(target[place])}, but there are "
        f"{num_classes} classes; class ids run from 0 to {num_classes - 1}, and "
        f"{rule.ignore_index} (ignore_index) leaves a row out."
    )


def _refuse_alpha(name: str, alpha: Tensor) -> None:
    value = float(alpha[~((alpha >= 1.0) & (alpha < torch.inf))][0])
    raise ValueError(f"{name}: alpha has the entry {value}, but it must be finite and at least 1.")
