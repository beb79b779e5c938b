"""The modules of the losses: what they pass on, and the learned alpha of a loss."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparseformer import functional
from sparseformer.nn.losses import (
    AMSoftmaxLoss,
    Entmax15Loss,
    EntmaxLoss,
    LinearCrossEntropy,
    LinearEntmaxLoss,
    LinearSparseCrossEntropy,
    SparseCrossEntropyLoss,
    SparsemaxLoss,
)

WEIGHT = torch.linspace(0.2, 1.7, 11)
SHARED = {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1, "weight": WEIGHT}
TILES = {"softcap": 2.0, "chunk_size": 2}

ON_LOGITS = [
    pytest.param(SparseCrossEntropyLoss, "sparse_cross_entropy", {"k": 4}, id="top-k"),
    pytest.param(SparseCrossEntropyLoss, "sparse_cross_entropy", {"top_p": 0.5}, id="top-p"),
    pytest.param(EntmaxLoss, "entmax_loss", {"alpha": 1.3}, id="entmax"),
    pytest.param(SparsemaxLoss, "sparsemax_loss", {}, id="sparsemax"),
    pytest.param(Entmax15Loss, "entmax15_loss", {}, id="entmax15"),
    pytest.param(AMSoftmaxLoss, "am_softmax_loss", {"margin": 0.1, "scale": 8.0}, id="margin"),
]
ON_HIDDEN_STATES = [
    pytest.param(LinearCrossEntropy, "linear_cross_entropy", {}, id="full"),
    pytest.param(LinearSparseCrossEntropy, "linear_sparse_cross_entropy", {"k": 4}, id="top-k"),
    pytest.param(LinearSparseCrossEntropy, "linear_sparse_cross_entropy", {"top_p": 0.5}, id="p"),
    pytest.param(LinearEntmaxLoss, "linear_entmax_loss", {"alpha": 1.3}, id="entmax"),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("module", "function", "arguments"), ON_LOGITS)
def test_module_passes_every_setting_to_its_function(
    module: type[nn.Module], function: str, arguments: dict
) -> None:
    logits, target = draw(2, 3, 11), torch.tensor([[0, 3, 5], [1, 10, 2]])
    expected = getattr(functional, function)(logits, target, **arguments, **SHARED)
    loss = module(**arguments, **SHARED)(logits, target)
    assert torch.equal(loss, expected)
    assert not torch.equal(module(**arguments)(logits, target), expected)


@pytest.mark.parametrize(("module", "function", "arguments"), ON_HIDDEN_STATES)
def test_linear_module_passes_every_setting_to_its_function(
    module: type[nn.Module], function: str, arguments: dict
) -> None:
    hidden, matrix, bias = draw(5, 4), draw(11, 4), draw(11)
    target = torch.tensor([0, 3, 5, 1, 10])
    options = {**arguments, **SHARED, **TILES}
    expected = getattr(functional, function)(hidden, matrix, target, linear_bias=bias, **options)
    loss = module(**options)(hidden, matrix, target, bias)
    assert torch.equal(loss, expected)
    assert "softcap=2.0, chunk_size=2" in repr(module(**options))


@pytest.mark.parametrize(("module", "function", "arguments"), ON_LOGITS + ON_HIDDEN_STATES)
def test_module_passes_its_backend(module: type[nn.Module], function: str, arguments: dict) -> None:
    inputs = (draw(5, 11),) if "linear" not in function else (draw(5, 4), draw(11, 4))
    with pytest.raises(ValueError, match=f"{function}: backend is 'cpp'"):
        module(**arguments, backend="cpp")(*inputs, torch.arange(5))


@pytest.mark.parametrize("module", [EntmaxLoss, LinearEntmaxLoss])
def test_learned_alpha_has_the_gradient_of_the_loss(module: type[nn.Module]) -> None:
    criterion = module(1.4, learn_alpha=True)
    alpha = criterion.current_alpha()
    assert alpha.shape == ()
    assert alpha.item() == pytest.approx(1.4, abs=1e-6)
    hidden, matrix, target = draw(5, 4), draw(11, 4), torch.arange(5)
    operands = (hidden, matrix) if module is LinearEntmaxLoss else (F.linear(hidden, matrix),)
    logit = criterion.alpha.adaptive.logits
    (slope,) = torch.autograd.grad(criterion(*operands, target), logit)

    def at(shift: float) -> float:
        with torch.no_grad():
            moved = torch.sigmoid(logit.double() + shift) + 1
            doubled = [operand.double() for operand in operands]
            function = (
                functional.linear_entmax_loss if len(doubled) == 2 else functional.entmax_loss
            )
            return function(*doubled, target, moved).item()

    assert slope.item() == pytest.approx((at(1e-4) - at(-1e-4)) / 2e-4, rel=1e-3)


def test_fixed_alpha_is_a_number_without_parameters() -> None:
    criterion = LinearEntmaxLoss(1.7)
    assert criterion.current_alpha() == 1.7
    assert list(criterion.parameters()) == []
    assert criterion.state_dict() == {}


def test_minimising_over_its_own_alpha_ends_at_max_alpha() -> None:
    """The loss falls in alpha, so this is a schedule and no choice; the docstring says so."""
    criterion = EntmaxLoss(1.1, learn_alpha=True, max_alpha=1.6)
    optimizer = torch.optim.SGD(criterion.parameters(), lr=50.0)
    logits, target = draw(20, 11), torch.arange(20) % 11
    alphas = []
    for _ in range(30):
        optimizer.zero_grad()
        criterion(logits, target).backward()
        optimizer.step()
        alphas.append(criterion.current_alpha().item())
    assert all(after >= before for before, after in pairwise(alphas))
    assert 1.59 < alphas[-1] <= 1.6


def test_class_weights_move_and_are_saved_with_the_module() -> None:
    criterion = SparseCrossEntropyLoss(k=2, weight=torch.ones(5))
    assert criterion.double().weight.dtype == torch.float64
    assert list(criterion.state_dict()) == ["weight"]
    assert "k=2, top_p=None, ignore_index=-100, reduction='mean'" in repr(criterion)
