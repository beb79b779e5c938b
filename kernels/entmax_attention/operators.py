"""Attention as torch operators, which torch.compile traces through."""

from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import Chosen, choose_backend
from sparseformer.kernels.common.operators import define_operator, no_second_derivative
from sparseformer.kernels.entmax_attention import pytorch
from sparseformer.kernels.entmax_attention.arguments import Arguments, Saved, Wanted
from sparseformer.kernels.entmax_attention.checks import (
    BACKENDS,
    checked_alpha,
    checked_segments,
)
from sparseformer.kernels.entmax_attention.saved import empty_saved
from sparseformer.kernels.entmax_attention.stats import AttentionStats

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? alpha, Tensor? relative_bias, "
    "Tensor? key_start, Tensor? key_end, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, "
    "str mapping, float parameter, int left, int right, float dropout_p, float scale, str backend, "
    "int chunk_elements"
)
_COUNT = len(Arguments._fields)
_TENSORS = Arguments._fields.index("mapping")


def attend(arguments: Arguments) -> Tensor:
    """Return the output, saving something only if a gradient is needed."""
    output: Tensor = _attention(*arguments, _needs_gradient(arguments), False)[0]
    return output


def attend_with_stats(arguments: Arguments) -> tuple[Tensor, AttentionStats]:
    """Return the output and its sparsity."""
    output, *_, counts = _attention(*arguments, _needs_gradient(arguments), True)
    return output, AttentionStats(*counts.detach().unbind())


def _needs_gradient(arguments: Arguments) -> bool:
    inputs = arguments.differentiable()
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _forward(*flat: Any) -> tuple[Tensor, ...]:
    arguments = Arguments(*flat[:_COUNT])
    keep, count = flat[_COUNT:]
    backend = _chosen(arguments)
    if backend == "triton":
        return _forward_triton(arguments, keep, count)
    output, saved, counts = pytorch.attention_forward(arguments, keep, count, backend)
    return output, *saved, counts


def _forward_triton(arguments: Arguments, keep: bool, count: bool) -> tuple[Tensor, ...]:
    from sparseformer.kernels.entmax_attention.forward import attention_forward
    from sparseformer.kernels.entmax_attention.stats_kernel import attention_stats

    _check_values(arguments)
    # The statistics need the thresholds.
    output, saved = attention_forward(arguments, keep or count)
    if not count:
        return output, *saved, _no_counts(arguments)
    counts = torch.stack(attention_stats(arguments, saved.rows))
    return output, *(saved if keep else empty_saved(arguments, False)), counts


def _check_values(arguments: Arguments) -> None:
    """Check what a GPU would have to wait for, where the tensors are on the CPU (interpreted)."""
    if not arguments.query.is_cuda:
        checked_alpha(arguments.alpha, arguments.parameter)
        checked_segments(arguments)


def _no_counts(arguments: Arguments) -> Tensor:
    query = arguments.query
    return query.new_empty((0, query.shape[1]), dtype=torch.float32)


def _chosen(arguments: Arguments) -> Chosen:
    name = f"{arguments.mapping}_attention"
    allowed = BACKENDS[arguments.mapping]
    query = arguments.query
    return choose_backend(name, arguments.backend, query, allowed, interprets_float64=True)


def _fake_forward(*flat: Any) -> tuple[Tensor, ...]:
    arguments = Arguments(*flat[:_COUNT])
    keep, count = flat[_COUNT:]
    output = pytorch.empty_output(arguments, arguments.query.dtype)
    counts = output.new_empty((4 if count else 0, output.shape[1]), dtype=torch.float32)
    unset = empty_saved if _chosen(arguments) == "triton" else pytorch.empty_saved
    return output, *unset(arguments, keep), counts


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[1:4])
    ctx.settings = inputs[_TENSORS:_COUNT]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (_COUNT + 2 - 5)
    if grad_output is None:
        return (None,) * 5 + rest
    saved = ctx.saved_tensors
    arguments = (*saved[:_TENSORS], *ctx.settings)
    wanted = list(ctx.needs_input_grad[:5])
    grads = _attention_backward(grad_output, *arguments, *saved[_TENSORS:], wanted)
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True)) + rest


def _gradients(grad_output: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    arguments, saved = Arguments(*flat[:_COUNT]), Saved(*flat[_COUNT : _COUNT + 3])
    wanted = Wanted(*flat[-1])
    backend = _chosen(arguments)
    if backend == "triton":
        from sparseformer.kernels.entmax_attention.backward import attention_backward

        grads = attention_backward(arguments, saved, grad_output, wanted)
    else:
        grads = pytorch.attention_backward(arguments, saved, grad_output, wanted, backend)
    return tuple(grad_output.new_empty(0) if grad is None else grad for grad in grads)


def _fake_gradients(grad_output: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    inputs = Arguments(*flat[:_COUNT]).differentiable()
    return tuple(
        torch.empty_like(x) if want and x is not None else grad_output.new_empty(0)
        for x, want in zip(inputs, flat[-1], strict=True)
    )


_attention = define_operator(
    "attention",
    f"({_ARGUMENTS}, bool keep, bool count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    _backward,
    _setup,
)
_attention_backward = define_operator(
    "attention_backward",
    f"(Tensor grad_output, {_ARGUMENTS}, Tensor rows, Tensor direction, Tensor tiles, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
    no_second_derivative("entmax_attention, topk_attention and topp_attention"),
)
