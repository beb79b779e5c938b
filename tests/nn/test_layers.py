"""Norms, feed-forward blocks and residual connections against their closed forms."""

import math

import pytest
import torch
from torch import Tensor, nn

from sparseformer.config import Activation
from sparseformer.nn.layers import FeedForward, Residual, make_norm


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


CLOSED_FORMS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swish": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("activation", list(CLOSED_FORMS))
def test_feed_forward_is_its_equation(activation: Activation) -> None:
    torch.manual_seed(0)
    layer = FeedForward(6, 10, activation=activation)
    nn.init.normal_(layer.in_proj.bias)
    x = torch.randn(4, 6)
    inner = CLOSED_FORMS[activation](x @ layer.in_proj.weight.t() + layer.in_proj.bias)
    expected = inner @ layer.out_proj.weight.t() + layer.out_proj.bias
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("activation", list(CLOSED_FORMS))
def test_gated_feed_forward_multiplies_by_a_second_projection(activation: str) -> None:
    torch.manual_seed(0)
    layer = FeedForward(6, 10, activation=f"gated_{activation}", bias=False)  # type: ignore[arg-type]
    first, second = layer.in_proj.weight.chunk(2)
    x = torch.randn(4, 6)
    expected = (
        CLOSED_FORMS[activation](x @ first.t()) * (x @ second.t())
    ) @ layer.out_proj.weight.t()
    torch.testing.assert_close(layer(x), expected)
    assert [name for name, _ in layer.named_parameters()] == ["in_proj.weight", "out_proj.weight"]


def test_gated_halves_have_the_spread_of_a_single_projection() -> None:
    torch.manual_seed(0)
    layer = FeedForward(64, 256, activation="gated_swish")
    bound = math.sqrt(6 / (64 + 256))
    largest = layer.in_proj.weight.abs().max().item()
    assert 0.99 * bound < largest <= bound


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"activation is 'tanh'.*relu"):
        FeedForward(2, 2, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm is 'batch'.*rms_norm"):
        make_norm("batch", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm position is 'mid'.*post"):
        Residual(nn.Identity(), "mid")  # type: ignore[arg-type]


def test_norms_are_their_equations() -> None:
    x = torch.tensor([[1e-3, 2e-3, -3e-3, 4e-3]])
    centred = x - x.mean()
    layer_norm = centred / torch.sqrt(centred.square().mean() + 1e-5)
    torch.testing.assert_close(make_norm("layer_norm", 4)(x), layer_norm)
    rms_norm = make_norm("rms_norm", 4)
    torch.testing.assert_close(rms_norm(x), x / torch.sqrt(x.square().mean() + 1e-6))
    assert [name for name, _ in rms_norm.named_parameters()] == ["weight"]
    wide = make_norm("rms_norm", 4, eps=1.0)(x)
    torch.testing.assert_close(wide, x / torch.sqrt(x.square().mean() + 1.0))


def test_residual_normalises_before_or_after() -> None:
    norm = make_norm("layer_norm", 4)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    pre, post = Residual(norm, "pre"), Residual(norm, "post")
    torch.testing.assert_close(pre(x, torch.exp), x + norm(x).exp())
    torch.testing.assert_close(post(x, torch.exp), norm(x + x.exp()))


def test_residual_dropout_spares_the_input_and_evaluation() -> None:
    torch.manual_seed(0)
    residual = Residual(nn.Identity(), "pre", dropout=0.5)
    x = torch.ones(1000, 4)
    change = residual(x, lambda _: torch.ones_like(x)) - 1
    assert set(change.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < (change == 0).float().mean() < 0.6
    torch.testing.assert_close(residual.eval()(x, lambda y: y), x + x)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_half_precision_sums_beyond_its_range_stay_finite(position: str) -> None:
    """T5's feed-forward sums pass 65504 in fp16, which became inf, and NaN in the next RMSNorm."""
    layer = FeedForward(16, 4160, bias=False).half()
    for weight in layer.parameters():
        nn.init.ones_(weight)
    x = torch.ones(1, 16, dtype=torch.float16)
    assert layer(x).tolist() == [[66560.0] * 16]
    norm = make_norm("rms_norm", 16).half()
    residual = Residual(norm, position)  # type: ignore[arg-type]
    total = residual(x, layer)
    assert total.dtype == torch.float16
    assert torch.isfinite(norm(total)).all()


def test_autocast_to_half_precision_sums_in_fp32() -> None:
    """As above, with fp32 weights under autocast: the sum must not be rounded to fp16 and back."""
    layer = FeedForward(16, 4160, bias=False)
    for weight in layer.parameters():
        nn.init.ones_(weight)
    with torch.autocast("cpu", torch.float16):
        output = layer(torch.ones(1, 16))
    assert output.dtype == torch.float32
    assert output.tolist() == [[66560.0] * 16]
