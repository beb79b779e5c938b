"""The backward kernels of attention, interpreted: where their operands lie and what they touch.

Holds strides, offsets beyond 2**31, NaN where nothing is seen, unset memory; that only active tiles
are computed, and only what is asked for.
"""

from typing import Any

import pytest
import torch
from attention_backward_case import (
    LEARNED,
    BackwardCase,
    forward_state,
    hold,
    reference_gradients,
    wanted_of,
)
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from sparseformer.kernels.entmax_attention.arguments import Arguments, Wanted
from sparseformer.kernels.entmax_attention.backward import attention_backward
from sparseformer.testing import poison_empty


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
    hold(case.run(hidden, grad_output), reference_gradients(case, reference_bias, grad_output))


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
