"""compat.entmax has the names, signatures, shapes and values of entmax 1.3."""

import inspect

import entmax as package
import pytest
import torch
from torch import Tensor

from sparseformer.compat import entmax

NAMES = [name for name in dir(package) if "max" in name.lower() or "budget" in name.lower()]
MAPS = ("sparsemax", "entmax15", "sparsemax_bisect", "entmax_bisect", "normmax_bisect")
LOSSES = (
    "sparsemax_loss",
    "entmax15_loss",
    "sparsemax_bisect_loss",
    "entmax_bisect_loss",
    "normmax_bisect_loss",
)
LOSS_MODULES = (
    "SparsemaxLoss",
    "Entmax15Loss",
    "SparsemaxBisectLoss",
    "EntmaxBisectLoss",
    "NormmaxBisectLoss",
)


def scores(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).to(dtype)


def test_the_public_names_are_theirs() -> None:
    assert set(entmax.__all__) == set(NAMES)


@pytest.mark.parametrize("room", ["activations", "losses", "root_finding"])
def test_the_submodules_hold_the_same_names(room: str) -> None:
    theirs = {
        name for name in vars(getattr(package, room)) if name in NAMES and name in package.__dict__
    }
    own = getattr(entmax, room)
    missing = {name for name in theirs if not hasattr(own, name) and _home(package, name) == room}
    assert theirs
    assert not missing


def _home(module: object, name: str) -> str:
    return getattr(module, name).__module__.split(".")[-1]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_their_names_order_and_defaults(name: str) -> None:
    theirs = inspect.signature(getattr(package, name)).parameters
    ours = inspect.signature(getattr(entmax, name)).parameters
    found = {key: ours[key].default for key in ours if key != "return_support_size"}
    assert list(found.items()) == [(key, theirs[key].default) for key in theirs]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dim", [-1, 0, 1], ids=lambda dim: f"dim{dim}")
def test_maps_agree_with_the_package_in_float64(name: str, dim: int) -> None:
    x = scores(4, 7, 3).requires_grad_()
    weights = scores(4, 7, 3, seed=1)
    results = []
    for module in (entmax, package):
        probs = getattr(module, name)(x, dim=dim)
        (grad,) = torch.autograd.grad((probs * weights).sum(), x)
        results.append((probs, grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-13)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("budget", [0.0, 0.4, 1.0, 2.5, 7.0])
def test_budget_agrees_with_the_package_in_float64(budget: float) -> None:
    x = scores(4, 7, seed=3).requires_grad_()
    weights = scores(4, 7, seed=4)
    results = []
    for module in (entmax, package):
        p = module.budget_bisect(x, budget)
        results.append((p, torch.autograd.grad((p * weights).sum(), x)[0]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-13)
    assert torch.allclose(results[0][0].sum(-1), torch.tensor(budget).double(), atol=1e-14)
    if 0.0 < budget < 7.0:
        torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 3.0])
def test_normmax_and_its_loss_agree_with_the_package_for_any_alpha(alpha: float) -> None:
    x, target = scores(6, 8).requires_grad_(), torch.tensor([0, 7, 3, 3, 1, 5])
    weights = scores(6, 8, seed=1)
    results = []
    for module in (entmax, package):
        probs = module.normmax_bisect(x, alpha)
        losses = module.normmax_bisect_loss(x, target, alpha)
        (grad,) = torch.autograd.grad((probs * weights).sum() + losses.sum(), x)
        results.append((probs, losses, grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_each_row_may_have_its_own_budget_and_normmax_alpha() -> None:
    x, rows = scores(3, 8), torch.tensor([[1.5], [2.0], [4.0]])
    for name in ("budget_bisect", "normmax_bisect"):
        function = getattr(entmax, name)
        separately = [function(x[i], rows[i].item()) for i in range(3)]
        torch.testing.assert_close(function(x, rows), torch.stack(separately), rtol=0, atol=1e-15)
        torch.testing.assert_close(
            function(x.T, rows.T, dim=0), torch.stack(separately, 1), rtol=0, atol=1e-15
        )


def test_normmax_loss_is_0_from_its_margin_on_and_never_negative() -> None:
    # Just below a lead of 1, on logits near 8, rounding alone would make some losses negative.
    leads = torch.cat([torch.linspace(-3, 3, 61), torch.linspace(0.99, 1, 1001)])
    x = leads[:, None] * torch.tensor([[1.0, 0.0, 0.0]])
    losses = entmax.normmax_bisect_loss(x + 7, torch.zeros(len(x), dtype=torch.int64))
    assert losses.min() == 0.0
    assert not losses[x[:, 0] > 1.01].any()
    assert losses[x[:, 0] < 0.9].min() > 1e-3


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 2.5])
def test_entmax_bisect_agrees_with_the_package_and_so_does_the_slope_of_alpha(alpha: float) -> None:
    x, weights = scores(5, 9), scores(5, 9, seed=1)
    slopes = []
    for module in (entmax, package):
        a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        (module.entmax_bisect(x, a) * weights).sum().backward()
        slopes.append(a.grad)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_agree_with_the_package_in_float64(name: str) -> None:
    x, target = scores(6, 8).requires_grad_(), torch.tensor([0, 7, 3, 3, 1, 5])
    ours, theirs = (getattr(module, name)(x, target) for module in (entmax, package))
    assert ours.shape == (6,)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = scores(6, seed=2)
    mine, other = (torch.autograd.grad((loss * weights).sum(), x)[0] for loss in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSS_MODULES)
@pytest.mark.parametrize("reduction", ["elementwise_mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 3], ids=["all_rows", "class_3_ignored"])
def test_loss_modules_reduce_as_the_package_does(
    name: str, reduction: str, ignore_index: int
) -> None:
    target = torch.tensor([0, 7, 3, 3, 1, 5])
    results = []
    for module in (entmax, package):
        x = scores(6, 8).requires_grad_()
        loss = getattr(module, name)(ignore_index=ignore_index, reduction=reduction)(x, target)
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Sparsemax", "Entmax15", "SparsemaxBisect", "EntmaxBisect"])
def test_modules_use_their_dim(name: str) -> None:
    x = scores(3, 4, 5)
    torch.testing.assert_close(
        getattr(entmax, name)(dim=1)(x), getattr(package, name)(dim=1)(x), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("name", ["NormmaxBisect", "BudgetBisect"])
def test_normmax_and_budget_modules_pass_on_their_settings(name: str) -> None:
    x = scores(3, 4, 5)
    ours, theirs = (getattr(module, name)(1.7, dim=0)(x) for module in (entmax, package))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("function", [entmax.sparsemax, entmax.entmax15], ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", [None, 1, 3, 100])
def test_the_support_size_is_that_of_the_result_whatever_k(function, k: int | None) -> None:
    x = scores(4, 9, 3)
    probs, size = function(x, dim=1, k=k, return_support_size=True)
    assert size.dtype == torch.int64
    assert torch.equal(size, (probs != 0).sum(1, keepdim=True))
    assert torch.equal(probs, function(x, dim=1))
    assert size.unique().numel() > 1


@pytest.mark.parametrize("module", [entmax.Sparsemax, entmax.Entmax15], ids=lambda m: m.__name__)
def test_modules_return_the_support_size_when_asked(module) -> None:
    probs, size = module(dim=0, return_support_size=True)(scores(5, 2))
    assert probs.shape == (5, 2)
    assert size.tolist() == (probs > 0).sum(0, keepdim=True).tolist()


def test_n_iter_and_ensure_sum_one_change_nothing() -> None:
    x = scores(3, 50, dtype=torch.float32)
    exact = entmax.entmax_bisect(x, 1.3)
    assert torch.equal(entmax.entmax_bisect(x, 1.3, n_iter=1, ensure_sum_one=False), exact)
    assert torch.equal(
        entmax.sparsemax_bisect(x, n_iter=1, ensure_sum_one=False), entmax.sparsemax(x)
    )
    assert torch.allclose(exact.sum(-1), torch.ones(3), atol=1e-6)
