"""The logarithms of the maps: their values, gradients and -inf against the maps themselves."""

import math
from collections.abc import Callable

import pytest
import torch
from entmax_case import bisect, scores
from torch import Tensor

from sparseformer import functional
from sparseformer.testing import assert_close_to_reference

INF = math.inf
Map = Callable[..., Tensor]
# The logarithm, and the map that it is the logarithm of.
PAIRS = [
    pytest.param(
        lambda x, **o: functional.log_entmax(x, 1.3, **o),
        lambda x, **o: functional.entmax(x, 1.3, **o),
        id="entmax",
    ),
    pytest.param(
        lambda x, **o: functional.log_entmax(x, 2.0, **o), functional.sparsemax, id="sparsemax"
    ),
    pytest.param(
        lambda x, **o: functional.log_topk_softmax(x, 3, **o),
        lambda x, **o: functional.topk_softmax(x, 3, **o),
        id="topk",
    ),
    pytest.param(
        lambda x, **o: functional.log_topp_softmax(x, 0.8, **o),
        lambda x, **o: functional.topp_softmax(x, 0.8, **o),
        id="topp",
    ),
    pytest.param(
        lambda x, **o: functional.log_taylor_softmax(x, 4, **o),
        lambda x, **o: functional.taylor_softmax(x, 4, **o),
        id="taylor",
    ),
]


@pytest.mark.parametrize(("log_map", "plain"), PAIRS)
def test_it_is_the_log_of_the_map(log_map: Map, plain: Map) -> None:
    x = scores(6, 9)
    x[0, [2, 5]] = -INF
    x[1] = -INF
    torch.testing.assert_close(log_map(x), plain(x).log(), atol=1e-12, rtol=0)
    torch.testing.assert_close(log_map(x.t(), dim=0), plain(x).log().t(), atol=1e-12, rtol=0)
    warm = log_map(x, temperature=2.0)
    torch.testing.assert_close(warm, plain(x / 2).log(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("log_map", "plain"), PAIRS)
def test_gradients_are_those_of_the_log_on_the_support(log_map: Map, plain: Map) -> None:
    x = scores(5, 8, seed=2)
    x[0, 3] = -INF
    upstream = scores(5, 8, seed=3)
    kept = plain(x) > 0
    at = x.clone().requires_grad_()
    actual = torch.autograd.grad(log_map(at), at, upstream)[0]
    by_hand = torch.where(kept, upstream / plain(x).masked_fill(~kept, 1.0), 0.0)
    expected = torch.autograd.grad(plain(at), at, by_hand)[0]
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)
    assert actual.abs().max() > 0.1


@pytest.mark.parametrize(("log_map", "plain"), PAIRS)
def test_gradients_pass_gradcheck(log_map: Map, plain: Map) -> None:
    x = scores(3, 7, seed=5)
    kept = plain(x) > 0
    assert kept.any(-1).all()
    assert torch.autograd.gradcheck(
        lambda at: log_map(at).masked_fill(~kept, 0.0), (x.requires_grad_(),)
    )


@pytest.mark.parametrize("bad", [-INF, INF, math.nan, 7.0], ids=str)
@pytest.mark.parametrize(("log_map", "plain"), PAIRS)
def test_gradients_that_come_in_off_the_support_are_ignored(
    log_map: Map, plain: Map, bad: float
) -> None:
    x = scores(4, 8, seed=6)
    x[0, :2] = -INF
    x[1] = -INF
    kept = plain(x) > 0
    assert not kept.all()
    upstream = scores(4, 8, seed=7)
    at = x.clone().requires_grad_()
    grads = [
        torch.autograd.grad(log_map(at), at, upstream.masked_fill(~kept, value))[0]
        for value in (0.0, bad)
    ]
    assert grads[1].isfinite().all()
    assert grads[1].equal(grads[0])
    assert grads[0][1].eq(0).all()


def test_alpha_gradient_of_log_entmax_passes_gradcheck() -> None:
    x = scores(3, 6, scale=0.1, seed=8)
    alpha = torch.tensor([[1.2], [1.5], [1.9]], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    assert (functional.entmax(x, alpha, temperature=temperature) > 0).all()
    assert torch.autograd.gradcheck(
        lambda a, t: functional.log_entmax(x, a, temperature=t), (alpha, temperature)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    """In fp16 a probability under 6e-8 would be lost before its log."""
    x = scores(8, 12, scale=4.0).to(dtype)
    assert_close_to_reference(functional.log_topk_softmax(x, 12), x.double().log_softmax(-1))
    assert_close_to_reference(functional.log_topp_softmax(x, 1.0), x.double().log_softmax(-1))
    assert_close_to_reference(
        functional.log_taylor_softmax(x, 4), functional.taylor_softmax(x.double(), 4).log()
    )
    log_probs = functional.log_entmax(x, 1.05)
    expected = bisect(x, 1.05).log()
    assert (expected < -17).logical_and(expected > -INF).any()
    assert log_probs.dtype == dtype
    assert_close_to_reference(
        log_probs.masked_fill(expected < -30, 0.0), expected.masked_fill(expected < -30, 0.0)
    )


def test_scores_far_below_the_largest_keep_a_finite_log() -> None:
    x = torch.tensor([[0.0, -500.0, 300.0]])
    torch.testing.assert_close(functional.log_topk_softmax(x, 3), x.log_softmax(-1))
    far = torch.tensor([[1e4, 1.0, -1e4]])
    expected = functional.log_taylor_softmax(far.double(), 12)
    assert expected[0, 1] < -80
    actual = functional.log_taylor_softmax(far, 12).double()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("order", [20, 30])
def test_taylor_of_any_order_is_positive_and_finite(order: int) -> None:
    """Factorials above 20! passed the largest integer, and rounding left negative values."""
    x = torch.linspace(-30, 30, 601).requires_grad_()
    p = functional.taylor_softmax(x, order)
    log_p = functional.log_taylor_softmax(x, order)
    assert (p >= 0).all()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert log_p.isfinite().all()
    (grad,) = torch.autograd.grad(log_p.sum() + p[0], x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()], ids=str)
@pytest.mark.parametrize(("log_map", "plain"), PAIRS)
def test_empty_tensors_and_scalars_keep_their_shape(
    log_map: Map, plain: Map, shape: tuple[int, ...]
) -> None:
    x = torch.zeros(shape, requires_grad=True)
    log_map(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    torch.testing.assert_close(log_map(x), plain(x).log())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda x: functional.log_topk_softmax(x, 0), "log_topk_softmax.*got 0", id="k"
        ),
        pytest.param(
            lambda x: functional.log_topp_softmax(x, 0.0), "log_topp_softmax.*0.0", id="p"
        ),
        pytest.param(
            lambda x: functional.log_taylor_softmax(x, 3), "log_taylor_softmax.*got 3", id="order"
        ),
        pytest.param(lambda x: functional.log_entmax(x, 0.5), "log_entmax.*got 0.5", id="alpha"),
        pytest.param(
            lambda x: functional.log_entmax(x.long(), 1.5), "log_entmax.*int64", id="integers"
        ),
    ],
)
def test_bad_settings_are_refused_by_name(call: Map, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4))
