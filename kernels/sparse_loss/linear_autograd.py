"""The losses on hidden states as one operator: what is saved, and which gradients there are."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.operators import (
    define_operator,
    no_second_derivative,
    unknown_size,
)
from sparseformer.kernels.sparse_loss.autograd import (
    accumulation_dtype,
    alpha_gradient,
    flat_alpha,
    put,
    refuse_second_derivative,
    stats_width,
    take,
)
from sparseformer.kernels.sparse_loss.counted import count_rows
from sparseformer.kernels.sparse_loss.linear import Head, LinearRows, Tiling
from sparseformer.kernels.sparse_loss.linear_sums import Kept, Sums, evaluate
from sparseformer.kernels.sparse_loss.results import Request
from sparseformer.kernels.sparse_loss.rules import RULE_SCHEMA, Rule


class LinearForward(NamedTuple):
    """Results of the operator on N rows, of which n count; what isn't wanted has size 0."""

    losses: Tensor  # [...]
    denominator: Tensor  # [], what the mean divides by
    stats: Tensor  # [N, 3 + ids]
    slope: Tensor  # [N], d loss / d alpha
    chosen: Tensor  # [n] places of the rows that count; [0] where all do
    rows: Tensor  # [e] and the next two: entries of the coefficients, see Kept
    columns: Tensor  # [e]
    values: Tensor  # [e]
    dense: Tensor  # [n, V] coefficients, or [0, V]
    again: Tensor  # [2 a] starts and stops of spans that are computed again; on the CPU


class Operands(NamedTuple):
    """The tensors of one call, as they are saved for the backward pass."""

    hidden: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    linear_bias: Tensor | None  # [V]
    alpha: Tensor | None  # broadcasts to [...]
    target: Tensor  # [...]
    weight: Tensor | None  # [V]

    def linear_rows(self, rule: Rule, rows: Tensor | None, request: Request) -> LinearRows:
        """Return the rows that count, with the tiling that both passes use."""
        dtype = accumulation_dtype(self.hidden.dtype)
        hidden = take(self.hidden.detach().reshape(-1, self.hidden.shape[-1]), rows)
        alpha = flat_alpha(self.alpha, rule.shape)
        linear_weight = self.linear_weight.detach()
        bias = None if self.linear_bias is None else self.linear_bias.detach()
        sizes = hidden.shape[0], linear_weight.shape[0]
        target, like = self.target.reshape(-1).long(), hidden.new_empty(0, dtype=dtype)
        return LinearRows(
            hidden=hidden,
            head=Head(linear_weight, bias, rule.softcap, dtype),
            targets=rule.targets(target, self.weight, rows, like),
            alpha=alpha if alpha is None or alpha.ndim == 0 else take(alpha, rows),
            rows=rows,
            rule=rule,
            tiling=Tiling.choose(*sizes, rule.chunk_size, hidden.is_cuda),
            request=request,
        )


def linear_forward(*arguments: Any) -> LinearForward:
    """Compute the losses of hidden states; rows that don't count are never read, and 0.

    Args:
        arguments: the Operands, the settings of RULE_SCHEMA, and which of gradient, slope and
            stats are wanted.
    """
    operands, (*flat_rule, wanted) = Operands(*arguments[:6]), arguments[6:]
    hidden, num_classes = operands.hidden, operands.linear_weight.shape[0]
    rule = Rule(*flat_rule).on(hidden)
    dtype = accumulation_dtype(hidden.dtype)
    checked = (operands.target, num_classes, operands.weight, operands.alpha, dtype)
    _, rows, denominator = count_rows(rule, *checked)
    call = operands.linear_rows(rule, rows, rule.request(*wanted))
    with torch.autocast(hidden.device.type, enabled=False):
        result = evaluate(call, stats_width(rule))
    num_rows = operands.target.numel()
    return LinearForward(
        put(result.losses, rows, num_rows).view(rule.shape),
        denominator,
        put(result.stats, rows, num_rows, -1) if call.request.stats else result.stats,
        put(result.slope, rows, num_rows) if call.request.slope else result.slope,
        operands.target.new_empty(0, dtype=torch.int64) if rows is None else rows,
        *result.kept,
    )


def _fake_forward(*arguments: Any) -> LinearForward:
    operands, (*flat_rule, (_, slope, stats)) = Operands(*arguments[:6]), arguments[6:]
    hidden, num_classes = operands.hidden, operands.linear_weight.shape[0]
    dtype = accumulation_dtype(hidden.dtype)
    losses = hidden.new_empty(hidden.shape[:-1], dtype=dtype)
    num_rows, sizes = losses.numel(), [unknown_size() for _ in range(5)]
    ids = operands.target.new_empty
    width = stats_width(Rule(*flat_rule))
    return LinearForward(
        losses,
        hidden.new_empty((), dtype=dtype),
        ids((num_rows if stats else 0, width), dtype=torch.int64),
        hidden.new_empty(num_rows if slope else 0, dtype=dtype),
        ids(sizes[0], dtype=torch.int64),
        ids(sizes[1], dtype=torch.int32),
        ids(sizes[2], dtype=torch.int32),
        hidden.new_empty(sizes[2], dtype=dtype),
        hidden.new_empty((sizes[3], num_classes), dtype=dtype),
        torch.empty(sizes[4], dtype=torch.int64, device="cpu"),
    )


def linear_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden states, matrix and bias; [0] where not needed.

    Args:
        grad: [...], of the losses.
        arguments: the Operands, `chosen` and all after it of LinearForward, the settings of
            RULE_SCHEMA, and which of the three are needed.
    """
    operands, chosen, kept = Operands(*arguments[:6]), arguments[6], Kept(*arguments[7:12])
    *flat_rule, needed = arguments[12:]
    rule, rows = Rule(*flat_rule).on(operands.hidden), chosen if chosen.numel() > 0 else None
    call = operands.linear_rows(rule, rows, rule.request(True, False, False))
    with torch.autocast(grad.device.type, enabled=False):
        sums = Sums(call, take(grad.reshape(-1), rows), kept, needed)
    dtype, empty = operands.hidden.dtype, operands.hidden.new_empty(0)
    hidden = empty
    if sums.hidden is not None:
        hidden = put(sums.hidden.to(dtype), rows, grad.numel()).view(operands.hidden.shape)
    return (
        hidden,
        empty.clone() if sums.weight is None else sums.weight.to(dtype),
        empty.clone() if sums.bias is None else sums.bias.to(dtype),
    )


def _fake_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, needed = Operands(*arguments[1:7]), arguments[-1]
    hidden, linear_weight = operands.hidden, operands.linear_weight
    return (
        hidden.new_empty(hidden.shape if needed[0] else (0,)),
        hidden.new_empty(linear_weight.shape if needed[1] else (0,)),
        hidden.new_empty(linear_weight.shape[:1] if needed[2] else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    result = LinearForward(*output)
    ctx.mark_non_differentiable(*result[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *result[3:])
    ctx.settings = inputs[6:-1]


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(ctx.settings[0])
    saved, needed = ctx.saved_tensors, list(ctx.needs_input_grad[:3])
    operands, slope, rest = saved[:6], saved[6], saved[7:]
    gradients: list[Tensor | None] = [None] * 4
    if grad is not None and any(needed):
        found = _GRADIENT_OPERATOR(grad, *operands, *rest, *ctx.settings, needed)
        gradients[:3] = [value if want else None for value, want in zip(found, needed, strict=True)]
    if grad is not None and ctx.needs_input_grad[3]:
        gradients[3] = alpha_gradient(grad, slope, operands[3].shape)
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - 4)


_OPERANDS = (
    "Tensor hidden, Tensor linear_weight, Tensor? linear_bias, Tensor? alpha, Tensor target, "
    "Tensor? weight"
)
_OPERATOR = define_operator(
    "linear_loss",
    f"({_OPERANDS}, {RULE_SCHEMA}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    linear_forward,
    _fake_forward,
    _backward,
    _setup_context,
)
_GRADIENT_OPERATOR = define_operator(
    "linear_loss_backward",
    f"(Tensor grad, {_OPERANDS}, Tensor chosen, Tensor rows, Tensor columns, Tensor values, "
    f"Tensor dense, Tensor again, {RULE_SCHEMA}, bool[] needed) -> (Tensor, Tensor, Tensor)",
    linear_backward,
    _fake_backward,
    no_second_derivative("the losses on hidden states"),
)


def linear_loss(operands: Operands, rule: Rule, stats: bool = False) -> LinearForward:
    """Call the operator."""
    recorded = torch.is_grad_enabled()
    keep = [value is not None and value.requires_grad and recorded for value in operands[:4]]
    wanted = [any(keep[:3]), keep[3], stats]
    return LinearForward(*_OPERATOR(*operands, *rule.settings, wanted))
