"""The backward kernels of attention, interpreted: every gradient against the dense definition.

Holds the gradients of query, key, value, alpha and relative bias over masks, packing, grouped
heads, dropout, widths and dtypes.
"""

import pytest
import torch
from attention_backward_case import (
    LEARNED,
    BackwardCase,
    hold,
    reference_gradients,
)

from sparseformer.kernels.entmax_attention.arguments import Wanted
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.interface import entmax_attention
from sparseformer.testing import assert_close_to_reference

PACKED = {"packed_q": (0, 3, 3, 21, 22, 30), "packed_k": (0, 20, 24, 41, 41, 53)}
CASES = {
    "one-tile": BackwardCase(queries=5, keys=7),
    "learned": BackwardCase(alpha=LEARNED, bias=True),
    "tall-tiles": BackwardCase(
        heads=1, key_heads=1, queries=40, keys=80, alpha=(1.3,), bias=True, blocks=Blocks(64, 64)
    ),
    "causal": BackwardCase(queries=33, keys=33, is_causal=True, alpha=LEARNED, bias=True),
    "causal-more-queries": BackwardCase(queries=35, keys=17, is_causal=True, bias=True),
    "decode": BackwardCase(queries=1, keys=65, is_causal=True, alpha=LEARNED, bias=True),
    "sparsemax": BackwardCase(heads=1, key_heads=1, alpha=2.0, bias=True),
    "softmax": BackwardCase(heads=1, key_heads=1, alpha=1.0, bias=True),
    "other-alpha": BackwardCase(heads=1, key_heads=1, alpha=1.3),
    "mixed-alpha": BackwardCase(heads=4, key_heads=4, queries=9, alpha=(1.05, 1.333, 1.9, 2.0)),
    "grouped": BackwardCase(heads=4, key_heads=2, queries=9, alpha=LEARNED * 2, bias=True),
    "multi-query": BackwardCase(batch=2, heads=3, key_heads=1, queries=16, keys=32, value_dim=8),
    "padding": BackwardCase(
        batch=3, queries=17, keys=20, start=(0, 17, 3), length=(3, 20, 19), alpha=LEARNED, bias=True
    ),
    "window": BackwardCase(queries=50, keys=60, window=(9, 4), alpha=LEARNED, bias=True),
    "packed": BackwardCase(queries=30, keys=53, **PACKED, is_causal=True, alpha=LEARNED, bias=True),
    # Blocks that start inside a tile of the grid, of which only another one is active.
    "packed-sparse": BackwardCase(
        heads=1,
        key_heads=1,
        queries=20,
        keys=120,
        packed_q=(0, 14, 20),
        packed_k=(0, 11, 120),
        alpha=2.0,
        spread=6.0,
        bias=True,
    ),
    "dropout": BackwardCase(
        batch=2, heads=1, key_heads=1, queries=18, keys=20, dropout_p=0.3, alpha=(1.3,), bias=True
    ),
    "scale": BackwardCase(queries=7, scale=0.11, alpha=LEARNED, bias=True),
    "odd-dims": BackwardCase(queries=7, dim=24, value_dim=40, alpha=LEARNED),
    "one-dim": BackwardCase(queries=7, dim=1, value_dim=1),
    "wide-dims": BackwardCase(heads=1, key_heads=1, dim=160, value_dim=72),
}
# Sizes and scales whose fp32 arguments of a kernel are exact.
EXACT_CASES = {
    "grouped-padding": BackwardCase(
        batch=2,
        heads=2,
        key_heads=1,
        queries=18,
        keys=20,
        start=(4, 0),
        length=(19, 20),
        alpha=LEARNED,
        bias=True,
        dropout_p=0.5,
    ),
    "packed": BackwardCase(
        queries=30, keys=53, **PACKED, window=(5, 3), alpha=LEARNED, bias=True, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_dense_definition(case: BackwardCase) -> None:
    arguments, grad_output = case.arguments(), case.grad_output()
    grads = case.run(arguments, grad_output)
    hold(grads, reference_gradients(case, arguments, grad_output))


@pytest.mark.parametrize("case", EXACT_CASES.values(), ids=EXACT_CASES)
def test_float64_gradients_are_exact(case: BackwardCase) -> None:
    arguments, grad_output = case.arguments(torch.float64), case.grad_output(torch.float64)
    grads = case.run(arguments, grad_output)
    hold(grads, reference_gradients(case, arguments, grad_output))


@pytest.mark.parametrize("name", ["learned", "packed", "dropout"])
def test_half_precision_gradients_are_as_close_as_the_dtype_allows(name: str) -> None:
    """The gradient of alpha stays an fp32 result, though sum u v / sum u is kept in fp16."""
    case, dtype = CASES[name], torch.float16
    arguments, grad_output = case.arguments(dtype), case.grad_output(dtype)
    grads = case.run(arguments, grad_output)
    references = reference_gradients(case, arguments, grad_output)
    given = [grad for grad in grads if grad is not None]
    baselines = tuple(
        reference.to(dtype) if grad.dtype == dtype else None
        for grad, reference in zip(given, references, strict=True)
    )
    assert [grad.dtype for grad in given] == [dtype] * 3 + [torch.float32, dtype]
    hold(grads, references, baselines)


def test_tiles_whose_queries_are_computed_in_halves_give_the_gradients() -> None:
    """With 16-bit inputs, a fixed alpha and tiles of 64 x 64, the kernel of keys takes 32 rows."""
    case = BackwardCase(
        batch=2,
        heads=1,
        key_heads=1,
        queries=90,
        keys=90,
        length=(77, 90),
        is_causal=True,
        blocks=Blocks(64, 64),
    )
    arguments, grad_output = case.arguments(torch.float16), case.grad_output(torch.float16)
    grads = case.run(arguments, grad_output)
    references = reference_gradients(case, arguments, grad_output)
    hold(grads, references, tuple(reference.half() for reference in references))


def test_bfloat16_gradients_have_its_dtype() -> None:
    """The interpreter computes them in fp32."""
    case, dtype = CASES["one-tile"], torch.bfloat16
    arguments, grad_output = case.arguments(dtype), case.grad_output(dtype)
    grads = case.run(arguments, grad_output)
    references = reference_gradients(case, arguments, grad_output)
    hold(grads, references, tuple(reference.to(dtype) for reference in references))


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
    """Scores [1, .5, 0, -1], values [1, -2, 3, .5]; the table of docs/math.md."""
    case = BackwardCase(1, 1, 1, queries=1, keys=4, dim=1, value_dim=1, alpha=(alpha,), scale=1.0)
    arguments = case.arguments()._replace(
        query=torch.ones(1, 1, 1, 1),
        key=torch.tensor([1.0, 0.5, 0.0, -1.0]).view(1, 1, 4, 1),
        value=torch.tensor([1.0, -2.0, 3.0, 0.5]).view(1, 1, 4, 1),
    )
    wanted = Wanted(False, False, False, True, False)
    (grad,) = (g for g in case.run(arguments, torch.ones(1, 1, 1, 1), wanted) if g is not None)
    assert float(grad) == pytest.approx(slope, rel=2e-5)


def test_gradients_next_to_softmax_are_those_of_pytorch() -> None:
    case = BackwardCase(queries=7, keys=20, alpha=(1.0, 1.0001))
    arguments, grad_output = case.arguments(), case.grad_output()
    leaves = [x.double().requires_grad_() for x in arguments[:4] if x is not None]
    output = entmax_attention(*leaves, backend="pytorch")
    references = torch.autograd.grad(output, leaves, grad_output.double())
    hold(case.run(arguments, grad_output), references)


def test_a_lone_key_has_no_gradient_but_its_value() -> None:
    """p is 1 whatever the scores are; what is left of dP - delta is rounding."""
    case = BackwardCase(queries=17, keys=1, alpha=LEARNED, bias=True)
    arguments, grad_output = case.arguments(), case.grad_output()
    grads = case.run(arguments, grad_output)
    assert grads.value is not None
    assert_close_to_reference(grads.value, grad_output.double().sum(2, keepdim=True))
    for grad in (grads.query, grads.key, grads.alpha, grads.relative_bias):
        assert grad is not None
        assert float(grad.abs().max()) < 1e-5


def test_large_scores_leave_one_key_and_nothing_infinite() -> None:
    case = BackwardCase(queries=9, keys=20, spread=3000.0, alpha=LEARNED)
    arguments, grad_output = case.arguments(), case.grad_output()
    grads = case.run(arguments, grad_output)
    references = reference_gradients(case, arguments, grad_output)
    assert grads.value is not None
    # fp32 holds a score of 10,000, and so t, to 1e-3.
    torch.testing.assert_close(grads.value.double(), references[2], rtol=0, atol=5e-3)
    for grad, largest in ((grads.query, 1.0), (grads.key, 3000.0), (grads.alpha, 1.0)):
        assert grad is not None
        assert float(grad.abs().max()) < 1e-5 * largest
