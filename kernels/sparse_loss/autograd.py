"""The losses on logits as one operator: saves the gradient's coefficients, few of each row."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.operators import (
    define_operator,
    no_second_derivative,
    unknown_size,
)
from sparseformer.kernels.sparse_loss.counted import count_rows
from sparseformer.kernels.sparse_loss.results import STATS_BEFORE_IDS
from sparseformer.kernels.sparse_loss.rules import RULE_SCHEMA, Rule


class LogitsForward(NamedTuple):
    """Results of the operator on N rows, of which n count; what isn't wanted has size 0."""

    losses: Tensor  # [...]
    denominator: Tensor  # [], what the mean divides by
    stats: Tensor  # [N, 3 + ids]
    slope: Tensor  # [N], d loss / d alpha
    rows: Tensor  # [n] places of the rows that count; [0] where all do
    coefficients: Tensor  # [n, m]
    columns: Tensor  # [n, m] classes of the coefficients; [0, 0] for all in order


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are made in: float32 for half precision, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def take(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the chosen rows; all, without a copy, where `rows` is None."""
    return values if rows is None else values[rows]


def put(values: Tensor, rows: Tensor | None, num_rows: int, fill: int = 0) -> Tensor:
    """Return num_rows rows that are `fill` where not chosen; the inverse of `take`."""
    if rows is None:
        return values
    return values.new_full((num_rows, *values.shape[1:]), fill).index_copy_(0, rows, values)


def flat_alpha(alpha: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return [] for one alpha of all rows, and else one alpha for each row, [N]."""
    if alpha is None:
        return None
    return alpha.reshape(()) if alpha.numel() == 1 else alpha.expand(shape).reshape(-1)


def alpha_gradient(grad: Tensor, slope: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of alpha of this shape, from that of the losses [...]."""
    product = grad * slope.view(grad.shape)
    return product.sum().view(shape) if shape.numel() == 1 else product.sum_to_size(shape)


def refuse_second_derivative(name: str) -> None:
    """Raise when the backward pass is recorded: its result would be taken for a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative; call backward or torch.autograd.grad without "
            "create_graph=True."
        )


def stats_width(rule: Rule) -> int:
    """Return the number of columns of the statistics: k ids, or the one of the largest logit."""
    return STATS_BEFORE_IDS + (rule.k or 1)


def logits_forward(
    logits: Tensor,
    alpha: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    *settings: Any,
) -> LogitsForward:
    """Compute the losses of logits [..., V]; rows that don't count are never read, and 0.

    Args:
        logits: [..., V].
        alpha: broadcasts to [...], or None.
        target: [...] class ids or [..., V] distributions.
        weight: [V] class weights, or None.
        settings: those of RULE_SCHEMA, and which of gradient, slope and stats are wanted.
    """
    *flat_rule, wanted = settings
    rule = Rule(*flat_rule).on(logits)
    request = rule.request(*wanted)
    num_classes, dtype = logits.shape[-1], accumulation_dtype(logits.dtype)
    target, rows, denominator = count_rows(rule, target, num_classes, weight, alpha, dtype)
    alpha = flat_alpha(alpha, rule.shape)
    flat = logits.detach().reshape(-1, num_classes)
    scores = take(flat, rows).to(dtype)
    top = scores.amax(-1)
    rule.refuse_bad_logits(scores, top, rows, "the layer that makes them")
    targets = rule.targets(target, weight, rows, scores)
    row_alpha = rule.alpha_of(alpha, rows, 0, scores.shape[0])
    result = rule.evaluate(scores, top, targets, row_alpha, request)
    num_rows, slope, stats = flat.shape[0], result.alpha_slope, result.stats
    columns = result.columns if request.gradient else None
    return LogitsForward(
        put(result.loss, rows, num_rows).view(rule.shape),
        denominator,
        _no_ids(flat, 2) if stats is None else put(stats, rows, num_rows, -1),
        scores.new_empty(0) if slope is None else put(slope, rows, num_rows),
        _no_ids(flat, 1) if rows is None else rows,
        result.coefficients if request.gradient else scores.new_empty(0, 0),
        _no_ids(flat, 2) if columns is None else columns,
    )


def _no_ids(like: Tensor, rank: int) -> Tensor:
    return like.new_empty((0,) * rank, dtype=torch.int64)


def _fake_forward(*arguments: Any) -> LogitsForward:
    logits, _, target, _, *flat_rule, (gradient, slope, stats) = arguments
    rule, dtype = Rule(*flat_rule), accumulation_dtype(logits.dtype)
    losses = logits.new_empty(logits.shape[:-1], dtype=dtype)
    num_rows, ids = losses.numel(), target.new_empty
    sizes = [unknown_size() for _ in range(5 if gradient else 1)]
    return LogitsForward(
        losses,
        logits.new_empty((), dtype=dtype),
        ids((num_rows, stats_width(rule)) if stats else (0, 0), dtype=torch.int64),
        logits.new_empty(num_rows if slope else 0, dtype=dtype),
        ids(sizes[0], dtype=torch.int64),
        logits.new_empty(sizes[1:3] if gradient else (0, 0), dtype=dtype),
        ids(sizes[3:5] if gradient else (0, 0), dtype=torch.int64),
    )


def logits_backward(
    grad: Tensor,
    rows: Tensor,
    coefficients: Tensor,
    columns: Tensor,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of logits of this shape and dtype from that of the losses [...]."""
    chosen = rows if rows.numel() > 0 else None
    num_rows, num_classes = grad.numel(), shape[-1]
    if coefficients.numel() == 0:
        return coefficients.new_zeros(shape, dtype=dtype)
    values = (coefficients * take(grad.reshape(-1), chosen)[:, None]).to(dtype)
    if columns.numel() > 0:
        # A class has one coefficient other than 0, so this sum is exact in any dtype.
        dense = values.new_zeros(values.shape[0], num_classes)
        values = dense.scatter_add_(-1, columns, values)
    return put(values, chosen, num_rows).view(shape)


def _fake_backward(grad: Tensor, *saved: Any) -> Tensor:
    *_, shape, dtype = saved
    return grad.new_empty(shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    result = LogitsForward(*output)
    ctx.mark_non_differentiable(*result[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*result[3:])
    logits, alpha = inputs[:2]
    ctx.name, ctx.shape, ctx.dtype = inputs[4], list(logits.shape), logits.dtype
    ctx.alpha_shape = None if alpha is None else alpha.shape


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(ctx.name)
    slope, *saved = ctx.saved_tensors
    grad_logits = grad_alpha = None
    if grad is not None and ctx.needs_input_grad[0]:
        grad_logits = _GRADIENT_OPERATOR(grad, *saved, ctx.shape, ctx.dtype)
    if grad is not None and ctx.needs_input_grad[1]:
        grad_alpha = alpha_gradient(grad, slope, ctx.alpha_shape)
    return grad_logits, grad_alpha, *(None,) * (len(ctx.needs_input_grad) - 2)


_OPERATOR = define_operator(
    "logits_loss",
    f"(Tensor logits, Tensor? alpha, Tensor target, Tensor? weight, {RULE_SCHEMA}, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    logits_forward,
    _fake_forward,
    _backward,
    _setup_context,
)
_GRADIENT_OPERATOR = define_operator(
    "logits_loss_backward",
    "(Tensor grad, Tensor rows, Tensor coefficients, Tensor columns, SymInt[] shape, "
    "ScalarType dtype) -> Tensor",
    logits_backward,
    _fake_backward,
    no_second_derivative("the losses on logits"),
)


def logits_loss(
    logits: Tensor,
    alpha: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    rule: Rule,
    stats: bool = False,
) -> LogitsForward:
    """Call the operator; arguments as in `logits_forward`."""
    recorded = torch.is_grad_enabled()
    slope = recorded and alpha is not None and alpha.requires_grad
    wanted = [recorded and logits.requires_grad, slope, stats]
    return LogitsForward(*_OPERATOR(logits, alpha, target, weight, *rule.settings, wanted))
