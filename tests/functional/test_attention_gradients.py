"""Gradients of attention against central differences, its definition, and autograd's rules."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import Case, attend_in_chunks, dense_attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparseformer.kernels.entmax_attention import entmax_attention, topk_attention, topp_attention
from sparseformer.testing import assert_close_to_reference

LEARNED = (1.2, 1.6)
CASES = {
    "plain": Case(queries=4, keys=5, alpha=LEARNED),
    "alpha-near-one": Case(queries=3, keys=4, alpha=(1.01, 1.0001)),
    "softmax": Case(queries=4, keys=5, alpha=1.0),
    "sparsemax": Case(queries=4, keys=5, alpha=2.0),
    "causal": Case(queries=5, keys=5, alpha=LEARNED, is_causal=True),
    "causal-long-queries": Case(queries=5, keys=3, alpha=LEARNED, is_causal=True),
    "grouped-bias": Case(
        heads=4, key_heads=2, queries=3, keys=5, alpha=LEARNED * 2, bias=True, is_causal=True
    ),
    "multi-query": Case(heads=2, key_heads=1, queries=3, keys=4, alpha=LEARNED),
    "padding": Case(queries=4, keys=5, start=(0, 2), length=(3, 5), alpha=LEARNED),
    "dead-rows": Case(queries=4, keys=4, start=(2, 4), alpha=LEARNED, is_causal=True),
    "window": Case(queries=5, keys=6, window=(1, 1), alpha=LEARNED, bias=True),
    "bias": Case(batch=1, queries=4, keys=3, bias=True, alpha=1.5),
    "decode": Case(queries=1, keys=6, alpha=LEARNED, is_causal=True, bias=True),
}
NAMES = ("query", "key", "value", "alpha", "relative_bias")


def _leaves(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a case that take a gradient, as fresh leaves."""
    given = {name: tensors[name] for name in NAMES if isinstance(tensors.get(name), Tensor)}
    return {name: x.clone().requires_grad_() for name, x in given.items()}


def _loss_weights(output: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(output.shape, dtype=torch.float64, generator=draw).to(output.dtype)


def _gradients(output: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, list(leaves.values()), _loss_weights(output))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_central_differences(case: Case) -> None:
    tensors = replace(case, dim=2, value_dim=2).tensors()
    leaves = _leaves(tensors)

    def run(*values: Tensor) -> Tensor:
        changed = dict(zip(leaves, values, strict=True))
        return attend_in_chunks(1 << 18, {**tensors, **changed}, **case.masks())

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("softmax", "alpha-near-one")])
@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 18], ids=["rows", "some", "all"])
def test_gradients_are_those_of_the_dense_definition(name: str, chunk_elements: int) -> None:
    case = CASES[name]
    tensors = case.tensors()
    leaves, dense_leaves = _leaves(tensors), _leaves(tensors)
    output = attend_in_chunks(chunk_elements, {**tensors, **leaves}, **case.masks())
    expected = dense_attention(case, {**tensors, **dense_leaves})
    actual = _gradients(output, leaves)
    for grad, reference in zip(actual, _gradients(expected, dense_leaves), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal", "grouped-bias", "padding"])
def test_low_precision_gradients_are_as_close_as_their_dtype_allows(name: str, dtype: Any) -> None:
    case = CASES[name]
    tensors = case.tensors(dtype)
    leaves = _leaves(tensors)
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    output = attend_in_chunks(1 << 18, {**tensors, **leaves}, **case.masks())
    expected = dense_attention(case, {**tensors, **wide})
    weights = _loss_weights(output)
    grads = torch.autograd.grad(output, list(leaves.values()), weights)
    references = torch.autograd.grad(expected, list(wide.values()), weights.double())
    for leaf, grad, reference in zip(leaves, grads, references, strict=True):
        assert grad.dtype == leaves[leaf].dtype
        baseline = None if grad.dtype == torch.float32 else reference.to(dtype)
        kind = "alpha" if leaf == "alpha" else "gradient"
        assert_close_to_reference(grad, reference, baseline, kind=kind)


@pytest.mark.parametrize(
    ("alpha", "slope"),
    [
        (1.05, -0.228335),
        (1.2, -0.289165),
        (1.333, -0.358319),
        (1.5, -0.475884),
        (1.9, 0.510779),
        (2.0, 0.553782),
    ],
)
def test_alpha_gradient_of_a_known_row(alpha: float, slope: float) -> None:
    """Scores [1, .5, 0, -1], values [1, -2, 3, .5], in fp32."""
    query = torch.ones(1, 1, 1, 1)
    key = torch.tensor([1.0, 0.5, 0.0, -1.0]).view(1, 1, 4, 1)
    value = torch.tensor([1.0, -2.0, 3.0, 0.5]).view(1, 1, 4, 1)
    learned = torch.tensor(alpha, requires_grad=True)
    entmax_attention(query, key, value, learned).sum().backward()
    assert math.isclose(float(learned.grad), slope, rel_tol=2e-5)


def test_alpha_gradient_at_one_is_the_limit() -> None:
    case = Case(queries=4, keys=6)
    tensors = case.tensors()

    def run(alpha: float | Tensor) -> Tensor:
        output = attend_in_chunks(1 << 18, {**tensors, "alpha": alpha})
        return (output * _loss_weights(output)).sum()

    alpha = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(run(alpha), alpha)
    # A one-sided difference of second order, since alpha below 1 is refused.
    step = 1e-4
    difference = (4 * run(1 + step) - 3 * run(1.0) - run(1 + 2 * step)) / (2 * step)
    torch.testing.assert_close(grad, difference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wanted", NAMES)
def test_only_the_gradients_asked_for_are_returned(wanted: str) -> None:
    case = CASES["grouped-bias"]
    tensors = case.tensors()
    leaves = _leaves(tensors)
    everything = dict(
        zip(
            leaves,
            _gradients(attend_in_chunks(9, {**tensors, **leaves}, **case.masks()), leaves),
            strict=True,
        )
    )
    alone = {name: x.detach().requires_grad_(name == wanted) for name, x in leaves.items()}
    output = attend_in_chunks(9, {**tensors, **alone}, **case.masks())
    (grad,) = _gradients(output, {wanted: alone[wanted]})
    assert torch.equal(grad, everything[wanted])
    assert all(x.grad is None for x in alone.values())


@pytest.mark.parametrize(
    ("attention", "parameter"),
    [(topk_attention, 2), (topp_attention, 0.7)],
    ids=["topk", "topp"],
)
def test_truncated_gradients_are_softmax_on_the_kept_set(attention: Any, parameter: Any) -> None:
    tensors = Case(queries=4, keys=6, heads=2, bias=True).tensors()
    leaves = {n: x for n, x in _leaves(tensors).items() if n != "alpha"}

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attention(query, key, value, parameter, relative_bias=bias, is_causal=True)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


def test_dropout_masks_forward_and_backward_alike() -> None:
    tensors = Case(batch=1, queries=4, keys=5, dim=2, alpha=LEARNED).tensors()
    leaves = _leaves(tensors)

    def run(*values: Tensor) -> Tensor:
        torch.manual_seed(3)
        changed = dict(zip(leaves, values, strict=True))
        return entmax_attention(**{**tensors, **changed}, dropout_p=0.4, is_causal=True)

    output = run(*leaves.values())
    (grad_value,) = torch.autograd.grad(output, leaves["value"], _loss_weights(output))
    # The output is linear in the value, so both sides are the same number.
    product = (grad_value * leaves["value"]).sum()
    torch.testing.assert_close(product, (output * _loss_weights(output)).sum())
    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


def test_second_derivatives_are_refused() -> None:
    tensors = Case().tensors()
    query = tensors["query"].requires_grad_()
    output = entmax_attention(query, tensors["key"], tensors["value"])
    (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="have no second derivative"):
        grad.sum().backward()


def test_backward_runs_twice_over_a_kept_graph() -> None:
    tensors = Case(alpha=LEARNED).tensors()
    leaves = _leaves(tensors)
    output = attend_in_chunks(10, {**tensors, **leaves})
    grads = [
        torch.autograd.grad(output.sum(), list(leaves.values()), retain_graph=True)
        for _ in range(2)
    ]
    for first, second in zip(*grads, strict=True):
        assert torch.equal(first, second)


def test_a_change_in_place_before_backward_is_noticed() -> None:
    tensors = Case().tensors(torch.float32)
    query = tensors["query"].requires_grad_()
    length = torch.tensor([3, 5])
    output = entmax_attention(query, tensors["key"], tensors["value"], key_length=length)
    length += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_checkpointing_repeats_dropout_and_gradients() -> None:
    tensors = Case(alpha=LEARNED).tensors()
    leaves = _leaves(tensors)

    def run(*values: Tensor) -> Tensor:
        return entmax_attention(*values, dropout_p=0.3, is_causal=True)

    results = []
    for use in (False, True):
        torch.manual_seed(11)
        values = tuple(leaves.values())
        output = checkpoint(run, *values, use_reentrant=False) if use else run(*values)
        results.append((output, *_gradients(output, leaves)))
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_nothing_is_saved_where_no_gradient_is_needed() -> None:
    tensors = Case(alpha=LEARNED).tensors()
    leaves = _leaves(tensors)
    with torch.no_grad():
        assert entmax_attention(**leaves).grad_fn is None
    detached = {name: x.detach() for name, x in leaves.items()}
    assert entmax_attention(**detached).grad_fn is None


def test_grad_output_may_have_any_strides() -> None:
    tensors = Case().tensors()
    query = tensors["query"].requires_grad_()
    output = entmax_attention(query, tensors["key"], tensors["value"])
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand_as(output)
    (actual,) = torch.autograd.grad(output, query, expanded, retain_graph=True)
    (expected,) = torch.autograd.grad(output, query, torch.ones_like(output))
    torch.testing.assert_close(actual, expected)
