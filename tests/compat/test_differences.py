"""Where compat departs from entmax 1.3 on purpose: our value, and theirs where theirs runs."""

import math

import entmax as package
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from sparseformer.compat import entmax

ROW = torch.tensor([[1.0, 0.5, 0.0, -1.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.float64)
FIRST = torch.tensor([0])
MAPS = ("sparsemax", "entmax15", "sparsemax_bisect", "entmax_bisect", "normmax_bisect")
LOSSES = {
    "sparsemax_loss": (0.0625, [-0.25, 0.25, 0.0, 0.0]),
    "sparsemax_bisect_loss": (0.0625, [-0.25, 0.25, 0.0, 0.0]),
    "entmax15_loss": (0.203261321, [-0.375802471, 0.291666667, 0.084135804, 0.0]),
    "entmax_bisect_loss": (0.203261321, [-0.375802471, 0.291666667, 0.084135804, 0.0]),
}


def test_alpha_of_1_is_softmax() -> None:
    ours, theirs = (module.entmax_bisect(ROW, alpha=1.0) for module in (entmax, package))
    torch.testing.assert_close(ours, ROW.softmax(-1), rtol=0, atol=1e-15)
    assert theirs.tolist() == [[0.25] * 4]


# alpha, then d(sum w p)/d alpha from bisection with 50 digits.
@pytest.mark.parametrize(
    ("alpha", "slope"),
    [(1.0, -0.2120650428), (1.0001, -0.2120958407), (1.001, -0.2123733238), (1.05, -0.2283347204)],
)
def test_the_slope_of_alpha_is_right_at_and_near_1_in_float32(alpha: float, slope: float) -> None:
    learned = torch.tensor(alpha, requires_grad=True)
    (entmax.entmax_bisect(ROW.float(), learned) * WEIGHTS.float()).sum().backward()
    assert learned.grad is not None
    assert learned.grad.item() == pytest.approx(slope, rel=2e-5)


def test_the_package_has_another_sign_and_size_for_that_slope() -> None:
    learned = torch.tensor(1.0001, requires_grad=True)
    (package.entmax_bisect(ROW.float(), learned) * WEIGHTS.float()).sum().backward()
    assert learned.grad is not None
    assert abs(learned.grad.item() - -0.2120958407) > 0.2


@pytest.mark.parametrize("name", [*MAPS, "budget_bisect"])
def test_a_fully_masked_row_is_zero_and_leaves_the_others_alone(name: str) -> None:
    """deep-spin/entmax#19: the package raises "index -1 is out of bounds", or returns NaN."""
    x = torch.cat([torch.full_like(ROW, -math.inf), ROW]).requires_grad_()
    probs = getattr(entmax, name)(x)
    (probs * WEIGHTS).sum().backward()
    assert x.grad is not None
    assert probs[0].tolist() == [0.0] * 4
    assert x.grad[0].tolist() == [0.0] * 4
    alone = ROW.clone().requires_grad_()
    expected = getattr(entmax, name)(alone)
    (expected * WEIGHTS).sum().backward()
    assert torch.equal(probs[1:], expected)
    assert torch.equal(x.grad[1:], alone.grad)


@pytest.mark.parametrize("name", MAPS)
def test_a_row_of_the_least_finite_score_is_uniform(name: str) -> None:
    least = torch.full((1, 4), torch.finfo(torch.float32).min)
    assert getattr(entmax, name)(least).tolist() == [[0.25] * 4]


@pytest.mark.parametrize("name", [*MAPS, "budget_bisect"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
def test_nan_and_inf_are_refused_by_name(name: str, value: float) -> None:
    """The package raises "index -1 is out of bounds", or returns NaN."""
    with pytest.raises(ValueError, match=f"got {value} in its scores"):
        getattr(entmax, name)(torch.tensor([[value, 1.0, 2.0]]))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_an_excluded_class(name: str) -> None:
    """deep-spin/entmax#9: the package returns NaN when a logit is -inf."""
    value, gradient = LOSSES[name]
    x = torch.tensor([[1.0, 0.5, 0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    loss = getattr(entmax, name)(x, FIRST)
    loss.sum().backward()
    assert x.grad is not None
    assert loss.tolist() == pytest.approx([value], abs=1e-9)
    assert x.grad[0].tolist() == pytest.approx(gradient, abs=1e-9)
    assert getattr(package, name)(x.detach(), FIRST).isnan().all()


def test_the_normmax_loss_takes_an_excluded_class_and_an_empty_row() -> None:
    x = torch.tensor([[1.0, 0.5, 0.0, -math.inf], [-math.inf] * 4], dtype=torch.float64)
    x.requires_grad_()
    loss = entmax.normmax_bisect_loss(x, torch.tensor([1, 2]))
    loss.sum().backward()
    assert x.grad is not None
    sliced = ROW[:, :3].clone().requires_grad_()
    expected = entmax.normmax_bisect_loss(sliced, torch.tensor([1]))
    expected.sum().backward()
    assert sliced.grad is not None
    assert loss.tolist() == [expected.item(), 0.0]
    assert x.grad.tolist() == [[*sliced.grad[0].tolist(), 0.0], [0.0] * 4]


def test_a_batch_with_every_row_ignored_has_loss_0() -> None:
    """The package divides by 0 rows and returns NaN."""
    x = ROW.clone().requires_grad_()
    loss = entmax.Entmax15Loss(ignore_index=0)(x, FIRST)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()
    assert package.Entmax15Loss(ignore_index=0)(ROW, FIRST).isnan()


@pytest.mark.parametrize("name", [*LOSSES, "normmax_bisect_loss"])
def test_target_minus_100_leaves_a_row_out(name: str) -> None:
    loss = getattr(entmax, name)(ROW.expand(2, 4), torch.tensor([-100, 2]))
    assert loss[0] == 0.0
    assert loss[1] > 0.5


@pytest.mark.parametrize("name", [*LOSSES, "normmax_bisect_loss"])
def test_a_target_that_is_no_class_is_refused_with_its_position(name: str) -> None:
    with pytest.raises(ValueError, match=r"position \(1,\) is 4"):
        getattr(entmax, name)(ROW.expand(2, 4), torch.tensor([0, 4]))


def test_a_loss_takes_an_alpha_for_each_row() -> None:
    """The package returns [n, n] losses for alpha of shape [n, 1]."""
    x, target = ROW.expand(2, 4), torch.tensor([0, 1])
    alphas = torch.tensor([[1.5], [2.0]], dtype=torch.float64)
    separately = [
        entmax.entmax_bisect_loss(x[i : i + 1], target[i : i + 1], alphas[i].item()).item()
        for i in range(2)
    ]
    for given in (alphas, alphas[:, 0]):
        losses = entmax.entmax_bisect_loss(x, target, given)
        assert losses.tolist() == pytest.approx(separately, abs=1e-14)
    assert package.entmax_bisect_loss(x, target, alphas).shape == (2, 2)


def test_the_loss_is_differentiable_in_alpha() -> None:
    """The package returns no gradient for it."""
    alpha = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda a: entmax.entmax_bisect_loss(ROW, FIRST, a), (alpha,))
    x = ROW.clone().requires_grad_()
    package.entmax_bisect_loss(x, FIRST, alpha).sum().backward()
    assert alpha.grad is None


def test_a_module_may_learn_its_alpha() -> None:
    """The package's module can't be built with a Parameter."""
    module = entmax.EntmaxBisect(nn.Parameter(torch.tensor(1.5)))
    (module(ROW.float()) * WEIGHTS.float()).sum().backward()
    (alpha,) = module.parameters()
    assert alpha.grad is not None
    assert alpha.grad.item() == pytest.approx(-0.475884, rel=1e-4)
    with pytest.raises(AttributeError):
        package.EntmaxBisect(nn.Parameter(torch.tensor(1.5)))


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_a_negative_dim_and_a_small_k_go_together(name: str) -> None:
    """The package permutes the wrong dims there, and raises."""
    x = 0.1 * torch.arange(12.0, dtype=torch.float64).reshape(1, 4, 3)
    expected = getattr(package, name)(x, dim=1)
    ours = getattr(entmax, name)(x, dim=-2, k=1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError):
        getattr(package, name)(x, dim=-2, k=1)


@pytest.mark.parametrize(("alpha", "theirs"), [(4.0, 1e-3), (10.0, 0.1)])
def test_large_alphas_are_right_in_float32(alpha: float, theirs: float) -> None:
    """deep-spin/entmax#36: a large alpha needs more digits of tau than float32 has."""
    x = torch.linspace(-1, 1, 2001)[:, None] * torch.tensor([[1.0, 0.0]])
    exact = _two_probabilities(x[:, 0].double(), alpha)
    assert _distance(entmax.entmax_bisect(x, alpha), exact) < 3e-7
    assert _distance(package.entmax_bisect(x, alpha), exact) > theirs


def _two_probabilities(lead: Tensor, alpha: float) -> Tensor:
    """Solve p**(alpha - 1) - (1 - p)**(alpha - 1) = (alpha - 1) lead for p itself, by bisection."""
    low, high = torch.zeros_like(lead), torch.ones_like(lead)
    for _ in range(60):
        p = (low + high) / 2
        below = p ** (alpha - 1) - (1 - p) ** (alpha - 1) < (alpha - 1) * lead
        low, high = torch.where(below, p, low), torch.where(below, high, p)
    return torch.stack([high, 1 - high], dim=-1)


def _distance(probs: Tensor, exact: Tensor) -> float:
    return float((probs.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [*MAPS, "budget_bisect"])
def test_excluded_scores_change_nothing_but_rounding(name: str, dtype: torch.dtype) -> None:
    """The package's test_mask allows 1e-8 in float32, where a last digit may be 6e-8."""
    generator = torch.Generator().manual_seed(42)
    x = torch.randn(2, 6, generator=generator).to(dtype)
    x[:, 3:] = -math.inf
    probs, alone = getattr(entmax, name)(x), getattr(entmax, name)(x[:, :3])
    assert not probs[:, 3:].any()
    torch.testing.assert_close(probs[:, :3], alone, rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("alpha", [0.2, 0.999, -1.0, math.inf, math.nan])
def test_alpha_below_1_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha of 1 or more"):
        entmax.entmax_bisect(ROW, alpha)
    with pytest.raises(ValueError, match="alpha of 1 or more"):
        entmax.entmax_bisect(ROW, torch.tensor([[alpha]]))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_one_alpha_for_each_row_along_any_dim(dim: int) -> None:
    """What the package's tests of several alphas and dims ask, from alpha = 1 up."""
    shape = [2, 3, 2, 4]
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    shape[dim] = 1
    alphas = 1 + 1.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    alphas.requires_grad_()
    rows = entmax.entmax_bisect(x, alphas, dim=dim).movedim(dim, -1).reshape(-1, x.shape[dim])
    flat = x.detach().movedim(dim, -1).reshape(-1, x.shape[dim])
    for row, probs, alpha in zip(flat, rows, alphas.flatten(), strict=True):
        expected = entmax.entmax_bisect(row, alpha.item())
        torch.testing.assert_close(probs, expected, rtol=0, atol=1e-13)
    gradcheck(lambda x, a: entmax.entmax_bisect(x, a, dim), (x, alphas), eps=1e-5)


@pytest.mark.parametrize("scale", [1e-5, 0.5, 1e4])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_k_changes_neither_result_nor_support(name: str, scale: float) -> None:
    """What the package's test_topk asks of its private helpers."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(3, 4, 5, generator=generator)
    for dim in range(3):
        full = getattr(entmax, name)(x, dim=dim, return_support_size=True)
        cut = getattr(entmax, name)(x, dim=dim, k=2, return_support_size=True)
        assert all(torch.equal(a, b) for a, b in zip(full, cut, strict=True))


@pytest.mark.parametrize("name", ["normmax_bisect", "budget_bisect"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    value = 1.0 if name == "normmax_bisect" else -0.5
    with pytest.raises(ValueError, match=rf"{name} needs a finite .*, got {value}"):
        getattr(entmax, name)(ROW, value)
    with pytest.raises(ValueError, match="that broadcasts to"):
        getattr(entmax, name)(ROW, torch.ones(3, 1))


def test_a_budget_beyond_the_scores_fills_them() -> None:
    x = torch.tensor([[1.0, -math.inf, 0.5, -3.0]])
    assert entmax.budget_bisect(x, 7).tolist() == [[1.0, 0.0, 1.0, 1.0]]


def test_half_precision_losses_come_in_float32() -> None:
    """The package sums them in float16, which ends at 65504."""
    x = torch.zeros(2000, 5, dtype=torch.float16)
    x[:, 0] = 40.0
    target = torch.ones(2000, dtype=torch.int64)
    loss = entmax.SparsemaxLoss(reduction="sum")(x, target)
    assert loss.dtype == torch.float32
    assert loss.item() == 80_000.0
    assert package.SparsemaxLoss(reduction="sum")(x, target).isinf()


@pytest.mark.parametrize("name", MAPS[:4])
def test_a_second_derivative_is_refused_by_name(name: str) -> None:
    x = ROW.clone().requires_grad_()
    probs = getattr(entmax, name)(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad((probs * WEIGHTS).sum(), x, create_graph=True)


def test_the_package_has_nan_for_a_second_derivative() -> None:
    x = ROW.clone().requires_grad_()
    loss = (package.entmax15(x) * WEIGHTS).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.autograd.grad((slope * WEIGHTS).sum(), x)[0].isnan().all()


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="elementwise_mean, sum, none"):
        entmax.SparsemaxLoss(reduction="mean")  # type: ignore[arg-type]
