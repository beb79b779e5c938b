"""Parameters are decayed as documented, the learning rate follows its formula, norms are exact."""

import math

import pytest
import torch
from torch import nn

from sparseformer.config import OptimConfig
from sparseformer.nn.mappings import AdaptiveAlpha
from sparseformer.training.optim import (
    build_optimizer,
    clip_gradients,
    learning_rate_factor,
    set_learning_rates,
)


class Network(nn.Module):
    """One of everything: embedding, tied output, matrix with bias, norm, alpha."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.alpha = AdaptiveAlpha(2, 1.5)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        group["name"]: {names[id(parameter)] for parameter in group["params"]}
        for group in optimizer.param_groups
    }


def test_only_matrices_are_decayed_and_alpha_has_its_own_rate() -> None:
    config = OptimConfig(lr=0.1, alpha_lr=0.3, weight_decay=0.5)
    model = Network()
    optimizer = build_optimizer(model, config)
    assert group_names(model, optimizer) == {
        "decay": {"linear.weight"},
        "no_decay": {"embed.weight", "linear.bias", "norm.weight", "norm.bias"},
        "alpha": {f"alpha.{name}" for name, _ in model.alpha.named_parameters()},
    }
    settings = [(g["lr"], g["peak_lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert settings == [(0.1, 0.1, 0.5), (0.1, 0.1, 0.0), (0.3, 0.3, 0.0)]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = Network()
    for parameter in [*model.alpha.parameters(), model.linear.weight, model.norm.bias]:
        parameter.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig())
    assert group_names(model, optimizer) == {
        "no_decay": {"embed.weight", "linear.bias", "norm.weight"}
    }


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        build_optimizer(nn.ReLU(), OptimConfig())


def test_the_first_step_is_the_one_of_adamw() -> None:
    """With bias correction, step 1 is p (1 - lr * decay) - lr * sign(g)."""
    model = nn.Linear(2, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = OptimConfig(lr=0.1, weight_decay=0.5, eps=1e-12)
    optimizer = build_optimizer(model, config)
    model.weight.grad = torch.tensor([[0.7, -3.0]])
    model.bias.grad = torch.tensor([0.2])
    optimizer.step()
    expected_weight = before[0] * 0.95 - 0.1 * torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(model.weight.detach(), expected_weight)
    torch.testing.assert_close(model.bias.detach(), before[1] - 0.1)


def test_betas_and_eps_come_from_the_config() -> None:
    optimizer = build_optimizer(Network(), OptimConfig(beta1=0.8, beta2=0.95, eps=1e-6))
    assert all(g["betas"] == (0.8, 0.95) and g["eps"] == 1e-6 for g in optimizer.param_groups)


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        ("constant", 0, 0.1),
        ("constant", 9, 1.0),
        ("constant", 10, 1.0),
        ("constant", 500, 1.0),
        ("linear", 4, 0.5),
        ("linear", 9, 1.0),
        ("linear", 59, 0.6),
        ("linear", 109, 0.2),
        ("linear", 500, 0.2),
        ("cosine", 9, 1.0),
        ("cosine", 34, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        ("cosine", 59, 0.6),
        ("cosine", 109, 0.2),
        ("inverse_sqrt", 0, 0.1),
        ("inverse_sqrt", 9, 1.0),
        ("inverse_sqrt", 39, 0.5),
        ("inverse_sqrt", 999, 0.1),
    ],
)
def test_schedules_follow_their_formula(schedule, step: int, factor: float) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=10, final_lr_share=0.2)
    assert learning_rate_factor(step, config, total_steps=110) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_without_warmup_the_first_step_has_nearly_the_peak(schedule) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=0)
    assert learning_rate_factor(0, config, total_steps=1000) > 0.99


def test_a_run_shorter_than_its_warmup_only_rises() -> None:
    config = OptimConfig(warmup_steps=200)
    factors = [learning_rate_factor(step, config, total_steps=3) for step in range(3)]
    assert factors == [1 / 200, 2 / 200, 3 / 200]


def test_every_group_is_scaled_from_its_own_peak() -> None:
    optimizer = build_optimizer(Network(), OptimConfig(lr=0.1, alpha_lr=0.4))
    for factor in (0.0, 0.5, 0.25):
        set_learning_rates(optimizer, factor)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025, 0.1]


def parameters_with_gradients(*gradients: list[float] | None) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return parameters


@pytest.mark.parametrize(
    ("max_norm", "scale"), [(1.0, 0.2), (10.0, 1.0), (0.0, 1.0)], ids=["above", "below", "off"]
)
def test_gradients_are_clipped_by_their_common_norm(max_norm: float, scale: float) -> None:
    parameters = parameters_with_gradients([3.0, 0.0], None, [0.0, 4.0])
    norm = clip_gradients(iter(parameters), max_norm)
    assert norm.item() == 5.0
    torch.testing.assert_close(parameters[0].grad, scale * torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(parameters[2].grad, scale * torch.tensor([0.0, 4.0]))
    assert parameters[1].grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_norm_that_is_not_finite_is_returned_as_it_is(bad: float) -> None:
    norm = clip_gradients(parameters_with_gradients([1.0, 2.0], [bad, 0.0]), 1.0).item()
    assert repr(norm) == repr(bad)


def test_no_gradients_have_the_norm_zero() -> None:
    assert clip_gradients(parameters_with_gradients(None), 1.0).item() == 0.0
