"""The backward kernels of attention, interpreted: every gradient against the dense definition.

Holds the gradients of query, key, value, alpha and relative bias over masks, packing, grouped
heads, dropout, widths and dtypes; strides, offsets beyond 2**31, NaN where nothing is seen, unset
memory; that only active tiles are computed, and only what is asked for.
"""

from typing import Any

import pytest
import torch
from attention_backward_case import (
    BackwardCase,
    forward_state,
    reference_gradients,
    wanted_of,
)
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from sparseformer.kernels.entmax_attention.arguments import Arguments, Gradients, Wanted
from sparseformer.kernels.entmax_attention.backward import attention_backward
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.interface import entmax_attention
from sparseformer.testing import assert_close_to_reference, poison_empty

LEARNED = (1.2, 1.6)
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


def _hold(
    grads: Gradients, references: tuple[Tensor, ...], baselines: tuple[Any, ...] | None = None
) -> None:
    """Compare what was asked for with the float64 gradients, in their order."""
    given = [grad for grad in grads if grad is not None]
    baselines = baselines or (None,) * len(given)
    for grad, reference, baseline in zip(given, references, baselines, strict=True):
        kind = "alpha" if grad is grads.alpha else "gradient"
        assert_close_to_reference(grad, reference, baseline, kind=kind)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_dense_definition(case: BackwardCase) -> None:
    arguments, grad_output = case.arguments(), case.grad_output()
    grads = case.run(arguments, grad_output)
    _hold(grads, reference_gradients(case, arguments, grad_output))


@pytest.mark.parametrize("case", EXACT_CASES.values(), ids=EXACT_CASES)
def test_float64_gradients_are_exact(case: BackwardCase) -> None:
    arguments, grad_output = case.arguments(torch.float64), case.grad_output(torch.float64)
    grads = case.run(arguments, grad_output)
    _hold(grads, reference_gradients(case, arguments, grad_output))


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
    _hold(grads, references, baselines)


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
    _hold(grads, references, tuple(reference.half() for reference in references))


def test_bfloat16_gradients_have_its_dtype() -> None:
    """The interpreter computes them in fp32."""
    case, dtype = CASES["one-tile"], torch.bfloat16
    arguments, grad_output = case.arguments(dtype), case.grad_output(dtype)
    grads = case.run(arguments, grad_output)
    references = reference_gradients(case, arguments, grad_output)
    _hold(grads, references, tuple(reference.to(dtype) for reference in references))


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
    _hold(case.run(arguments, grad_output), references)


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


def _in_one_projection(x: Tensor) -> Tensor:
    """Return x as a slice of one wider [B, L, 3 H D] tensor."""
    batch, heads, length, dim = x.shape
    wide = torch.full((batch, length, 3, heads, dim), torch.nan)
    wide[:, :, 1] = x.transpose(1, 2)
    return wide[:, :, 1].transpose(1, 2)


def _every_second_column(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:3], 2 * x.shape[3]), torch.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def _columns_first(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize(
    "restride", [_in_one_projection, _every_second_column, _columns_first], ids=lambda f: f.__name__
)
def test_strides_change_nothing(restride: Any) -> None:
    case = BackwardCase(queries=7, keys=20, heads=2, key_heads=1, alpha=LEARNED)
    arguments, grad_output = case.arguments(), case.grad_output()
    strided = arguments._replace(
        query=restride(arguments.query),
        key=restride(arguments.key),
        value=restride(arguments.value),
    )
    expected = case.run(arguments, grad_output)
    actual = case.run(strided, restride(grad_output))
    for grad, reference in zip(actual[:4], expected[:4], strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=0)


def test_expanded_upstream_gradients_are_read_in_place() -> None:
    case = BackwardCase(queries=7, keys=20)
    arguments = case.arguments()
    ones = torch.ones(()).expand(case.grad_output().shape)
    expected = case.run(arguments, ones.contiguous())
    for grad, reference in zip(case.run(arguments, ones)[:3], expected[:3], strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=0)


def test_gradients_have_the_layout_of_their_tensors() -> None:
    case = BackwardCase(queries=7, keys=9, heads=2)
    arguments = case.arguments()
    as_projected = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arguments[:3]]
    grads = case.run(arguments._replace(**dict(zip(_QKV, as_projected, strict=True))), _ones(case))
    for grad, x in zip(grads[:3], as_projected, strict=True):
        assert grad is not None
        assert grad.stride() == x.stride()


_QKV = ("query", "key", "value")


def _ones(case: BackwardCase) -> Tensor:
    return torch.ones_like(case.grad_output())


def test_rows_may_lie_beyond_two_to_the_31_elements() -> None:
    case = BackwardCase(heads=1, key_heads=1, queries=18, keys=18)
    arguments, grad_output = case.arguments(), case.grad_output()

    def far(x: Tensor) -> Tensor:
        step = (1 << 31) // 16
        spread = torch.empty_strided(x.shape, (0, 0, step, 1), dtype=torch.float32)
        return spread.copy_(x)

    spread = arguments._replace(**{name: far(getattr(arguments, name)) for name in _QKV})
    saved = forward_state(case, arguments)
    wanted = wanted_of(arguments)
    # Gradients in that layout would fill the memory, so each is asked for by a near tensor.
    actual = [
        attention_backward(
            spread._replace(**{name: getattr(arguments, name)}),
            saved,
            far(grad_output),
            Wanted(*(n == name for n in (*_QKV, "alpha", "relative_bias"))),
            case.blocks,
        )[index]
        for index, name in enumerate(_QKV)
    ]
    expected = attention_backward(arguments, saved, grad_output, wanted, case.blocks)
    for grad, reference in zip(actual, expected[:3], strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=0)


def test_what_nobody_sees_may_be_anything() -> None:
    """Padding slots of k and v, and queries (and their dO) that see no key, hold NaN."""
    case = BackwardCase(
        batch=2, queries=20, keys=20, start=(5, 20), is_causal=True, alpha=LEARNED, bias=True
    )
    clean, grad_output = case.arguments(), case.grad_output()
    visible = case.visible()
    dead_rows, hidden = ~visible.any(3)[..., None], ~visible.any(2)[..., None]
    nan = float("nan")
    dirty = clean._replace(
        query=clean.query.masked_fill(dead_rows, nan),
        key=clean.key.masked_fill(hidden, nan),
        value=clean.value.masked_fill(hidden, nan),
    )
    actual = case.run(dirty, grad_output.masked_fill(dead_rows, nan))
    expected = case.run(clean, grad_output)
    for grad, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=0)
    for grad, unseen in ((actual.query, dead_rows), (actual.key, hidden), (actual.value, hidden)):
        assert grad is not None
        assert not grad.masked_select(unseen).any()


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min], ids=["inf", "min"])
def test_a_bias_may_hide_keys(lowest: float) -> None:
    case = BackwardCase(heads=1, key_heads=1, queries=9, keys=20, alpha=1.3, bias=True)
    arguments, grad_output = case.arguments(), case.grad_output()
    assert arguments.relative_bias is not None
    bias = arguments.relative_bias.clone()
    bias[:, 3:15] = lowest
    hidden = arguments._replace(relative_bias=bias)
    reference_bias = hidden._replace(relative_bias=bias.clamp_min(-1e6))
    _hold(case.run(hidden, grad_output), reference_gradients(case, reference_bias, grad_output))


@pytest.mark.parametrize("name", ["query", "key", "value", "alpha", "relative_bias"])
def test_only_what_is_asked_for_is_computed(name: str) -> None:
    case = BackwardCase(queries=7, keys=20, alpha=LEARNED, bias=True)
    arguments, grad_output = case.arguments(), case.grad_output()
    wanted = Wanted(*(field == name for field in Wanted._fields))
    grads = case.run(arguments, grad_output, wanted)._asdict()
    expected = case.run(arguments, grad_output)._asdict()
    assert [field for field, grad in grads.items() if grad is not None] == [name]
    torch.testing.assert_close(grads[name], expected[name], rtol=0, atol=0)


def test_inactive_tiles_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 tile products per active tile, and 2 more for a relative bias."""
    case = BackwardCase(queries=50, keys=60, window=(9, 4), alpha=LEARNED, bias=True)
    arguments, grad_output = case.arguments(), case.grad_output()
    words = forward_state(case, arguments).tiles
    active = int(((words[..., None] >> torch.arange(32)) & 1).sum())
    assert 0 < active < words.numel() * 3
    products = 0
    create_dot = InterpreterBuilder.create_dot

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal products
        products += 1
        return create_dot(*args, **kwargs)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    case.run(arguments, grad_output, Wanted(True, True, True, True, False))
    assert products == 7 * active
    case.run(arguments, grad_output, Wanted(False, False, False, False, True))
    assert products == 9 * active


def test_a_tile_without_its_bit_has_no_part_in_any_gradient() -> None:
    case = BackwardCase(queries=20, keys=37, alpha=LEARNED, bias=True)
    arguments, grad_output = case.arguments(), case.grad_output()
    saved = forward_state(case, arguments)
    saved = saved._replace(tiles=torch.zeros_like(saved.tiles))
    grads = attention_backward(arguments, saved, grad_output, wanted_of(arguments), case.blocks)
    for grad in grads:
        assert grad is not None
        assert not grad.any()


def test_unset_memory_reaches_no_gradient() -> None:
    case = BackwardCase(queries=18, keys=20, window=(3, 2), alpha=LEARNED, bias=True)
    arguments, grad_output = case.arguments(), case.grad_output()
    expected = case.run(arguments, grad_output)
    with poison_empty():
        actual = case.run(arguments, grad_output)
    for grad, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=0)


def test_a_batch_row_does_not_depend_on_the_others() -> None:
    case = BackwardCase(batch=2, queries=17, keys=20, alpha=1.5, start=(0, 4), length=(20, 19))
    arguments, grad_output = case.arguments(), case.grad_output()
    alone = BackwardCase(batch=1, queries=17, keys=20, alpha=1.5, start=(4,), length=(19,))
    second = alone.arguments()._replace(**{name: getattr(arguments, name)[1:] for name in _QKV})
    both, one = case.run(arguments, grad_output), alone.run(second, grad_output[1:])
    for grad, reference in zip(one[:3], both[:3], strict=True):
        assert reference is not None
        torch.testing.assert_close(grad, reference[1:], rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)], ids=str)
def test_empty_inputs_have_zero_gradients(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = sizes
    case = BackwardCase(batch, heads, heads, queries, keys)
    arguments: Arguments = case.arguments()
    grads = attention_backward(
        arguments,
        forward_state(BackwardCase(), BackwardCase().arguments()),
        case.grad_output(),
        wanted_of(arguments),
    )
    for grad, x in zip(grads[:3], arguments[:3], strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(x))
