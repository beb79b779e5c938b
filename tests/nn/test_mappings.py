"""Mapping modules are their functions, and a learned alpha never leaves its range."""

import math

import pytest
import torch
from torch import nn

from sparseformer import functional
from sparseformer.nn.mappings import (
    AdaptiveAlpha,
    Entmax,
    Entmax15,
    Sparsemax,
    TaylorSoftmax,
    TopkSoftmax,
    ToppSoftmax,
)

X = torch.tensor([[1.0, 0.5, 0.0, -1.0], [0.3, 0.2, 2.0, 0.1]])


@pytest.mark.parametrize(
    ("module", "expected", "text"),
    [
        (
            Entmax(1.3, dim=0),
            functional.entmax(X, 1.3, 0),
            "Entmax(alpha=1.3, dim=0, temperature=1.0, backend='auto')",
        ),
        (
            Sparsemax(backend="pytorch"),
            functional.sparsemax(X),
            "Sparsemax(dim=-1, temperature=1.0, backend='pytorch')",
        ),
        (
            Entmax15(0),
            functional.entmax15(X, 0),
            "Entmax15(dim=0, temperature=1.0, backend='auto')",
        ),
        (
            TopkSoftmax(2, temperature=0.5),
            functional.topk_softmax(X, 2, temperature=0.5),
            "TopkSoftmax(k=2, dim=-1, temperature=0.5)",
        ),
        (
            ToppSoftmax(0.7),
            functional.topp_softmax(X, 0.7),
            "ToppSoftmax(p=0.7, dim=-1, temperature=1.0)",
        ),
        (
            TaylorSoftmax(4),
            functional.taylor_softmax(X, 4),
            "TaylorSoftmax(order=4, dim=-1, temperature=1.0)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_are_their_functions(module: nn.Module, expected: torch.Tensor, text: str) -> None:
    assert module(X).equal(expected)
    assert repr(module) == text


@pytest.mark.parametrize("module", [Entmax, Sparsemax, Entmax15], ids=lambda m: m.__name__)
def test_modules_pass_their_backend_on(module: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="backend is 'cuda', but it must be one of"):
        module(backend="cuda")(X)


def test_alpha_starts_where_it_is_told() -> None:
    torch.testing.assert_close(AdaptiveAlpha(3)(), torch.full((3,), 1.5))
    given = [1.01, 1.3, 1.999]
    torch.testing.assert_close(AdaptiveAlpha(3, given)(), torch.tensor(given))
    torch.testing.assert_close(AdaptiveAlpha.from_alphas(given)(), torch.tensor(given))
    torch.testing.assert_close(AdaptiveAlpha(1, 2.5, low=1.5, high=4.0)(), torch.tensor([2.5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((2, 1.0), "head 0 at 1.0: start strictly inside", id="at low"),
        pytest.param((2, [1.5, 2.0]), "head 1 at 2.0", id="at high"),
        pytest.param((2, 0.7), "head 0 at 0.7", id="below"),
        pytest.param((2, math.nan), "head 0 at nan", id="nan"),
        pytest.param((2, [1.5]), "num_heads is 2, init has 1", id="length"),
        pytest.param((0, 1.5), "num_heads is 0", id="no heads"),
        pytest.param((1, 1.5, 0.5, 2.0), "got low=0.5", id="low"),
        pytest.param((1, 1.5, 2.0, 1.0), "high=1.0", id="reversed"),
    ],
)
def test_a_bad_start_is_refused(arguments: tuple, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        AdaptiveAlpha(*arguments)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("low", [1.0, 1.2])
def test_alpha_stays_inside_its_range_under_adamw(sign: float, low: float) -> None:
    """A learned alpha drifted below 1 and the loss became NaN (entmax issue 39)."""
    module = AdaptiveAlpha(2, 1.5, low=low)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    x = X.repeat(2, 1, 1)
    for _ in range(50):
        optimizer.zero_grad()
        alpha = module()
        p = functional.entmax(x, alpha[:, None, None])
        (sign * alpha.sum() + p[..., 0].sum()).backward()
        assert module.logits.grad is not None
        assert module.logits.grad.isfinite().all()
        optimizer.step()
        assert (module() > low).all()
        assert (module() <= 2.0).all()


@pytest.mark.parametrize("logit", [-1e30, -200.0, 200.0, 1e30], ids=str)
def test_any_finite_logit_gives_an_alpha_inside_the_range(logit: float) -> None:
    module = AdaptiveAlpha(1)
    nn.init.constant_(module.logits, logit)
    assert 1.0 < module().item() < 2.0


def test_a_saturated_head_can_come_back() -> None:
    """Without the clamp the gradient at z = -50 is 2e-22, which AdamW can't tell from 0."""
    module = AdaptiveAlpha(2)
    with torch.no_grad():
        module.logits.copy_(torch.tensor([-50.0, 50.0]))
    module().sum().backward()
    assert module.logits.grad is not None
    outward, inward = module.logits.grad.tolist()
    assert outward == 0.0
    assert inward > 1e-6


def test_alpha_stays_fp32_in_a_cast_model() -> None:
    module = nn.Sequential(nn.Linear(2, 2), AdaptiveAlpha(2, 1.3)).to(torch.bfloat16)
    assert module[0].weight.dtype == torch.bfloat16
    assert module[1].logits.dtype == torch.float32
    torch.testing.assert_close(module[1](), torch.full((2,), 1.3))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_non_finite_checkpoint_is_refused_with_the_head_named(bad: float) -> None:
    model = nn.ModuleDict({"alpha": AdaptiveAlpha(3)})
    state = {"alpha.logits": torch.tensor([0.0, 0.1, bad])}
    with pytest.raises(RuntimeError, match=rf"alpha\.logits.* head 2: {bad}"):
        model.load_state_dict(state)


def test_alphas_survive_a_round_trip() -> None:
    source, target = AdaptiveAlpha(2, [1.2, 1.7]), AdaptiveAlpha(2)
    target.load_state_dict(source.state_dict())
    assert target().equal(source())
    assert repr(target) == "AdaptiveAlpha(num_heads=2, low=1.0, high=2.0)"
