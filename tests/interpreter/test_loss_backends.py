"""The public losses give the same on Triton's kernels as plain PyTorch does in float64."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loss_kernel_case import draw
from torch import Tensor

from sparseformer.functional import (
    entmax_loss,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss import (
    candidates_kernel,
    linear,
    products_kernel,
    topk_kernel,
)
from sparseformer.testing import assert_close_to_reference

ROWS, WIDTH = 4, 6
LAUNCHERS = {
    "top-k": (topk_kernel, "merge_top_k"),
    "candidates": (candidates_kernel, "collect"),
    "gather": (products_kernel, "gather_scale"),
    "segments": (products_kernel, "segment_sum"),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the launches of each kernel."""
    counts: Counter[str] = Counter()

    def counted(name: str, launcher: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            counts[name] += 1
            return launcher(*args)

        return launch

    for name, (module, function) in LAUNCHERS.items():
        monkeypatch.setattr(module, function, counted(name, getattr(module, function)))
    return counts


def cut(monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    """Make tiles of this many classes and all tokens, and never all logits at once."""
    monkeypatch.setattr(linear, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(linear, "TILE_TOKENS", ROWS)
    monkeypatch.setattr(linear, "TILE_LOGITS", ROWS * classes)


class Head:
    """Hidden states, an output projection, and targets: first, last, inside, ignored."""

    def __init__(self, num_classes: int, dtype: torch.dtype = torch.float32) -> None:
        self.hidden = (2.0 * draw(ROWS, WIDTH, seed=1)).to(dtype)
        self.weight = draw(num_classes, WIDTH, seed=2).to(dtype)
        self.bias = draw(num_classes, seed=3).to(dtype)
        self.target = torch.tensor([0, num_classes - 1, num_classes // 2, -100])

    def results(
        self, loss: Callable[..., Tensor], dtype: torch.dtype, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Return losses and the gradients of hidden, weight and bias, computed in this dtype."""
        operands = (self.hidden, self.weight, self.bias)
        hidden, weight, bias = (each.to(dtype).requires_grad_() for each in operands)
        losses = loss(hidden, weight, self.target, linear_bias=bias, reduction="none", **kwargs)
        grad = draw(ROWS, seed=4).to(losses.dtype)
        return losses.detach(), *torch.autograd.grad(losses, (hidden, weight, bias), grad)

    def check(self, loss: Callable[..., Tensor], **kwargs: Any) -> None:
        dtype = self.hidden.dtype
        ours = self.results(loss, dtype, backend="triton", **kwargs)
        plain = self.results(loss, dtype, backend="pytorch", **kwargs)
        exact = self.results(loss, torch.float64, backend="pytorch", **kwargs)
        for place, (actual, same, expected) in enumerate(zip(ours, plain, exact, strict=True)):
            kind = "gradient" if place else "forward"
            # Losses are float32, but the logits under them are rounded to the input's dtype.
            actual, same = actual.to(dtype), same.to(dtype)
            assert_close_to_reference(actual, expected, same, kind=kind)


@pytest.mark.parametrize(
    ("num_classes", "tile", "k"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (5, 3, 2),
        (16, 15, 2),
        (33, 34, 4),
        (255, 254, 8),
        (257, 130, 16),
        (400, 4096, 8),
        (600, 599, 64),
        (300, 200, 300),
    ],
    ids=str,
)
def test_top_k_on_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
    launches: Counter[str],
    num_classes: int,
    tile: int,
    k: int,
) -> None:
    cut(monkeypatch, tile)
    Head(num_classes).check(linear_sparse_cross_entropy, k=k)
    if num_classes >= 8 * (k + 1):
        assert launches["top-k"] == -(-num_classes // tile)
        assert launches["gather"] == 1
        # One for the weight, one for the bias.
        assert launches["segments"] == 2


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2], ids=str)
@pytest.mark.parametrize(
    ("num_classes", "tile"), [(1, 1), (7, 3), (255, 254), (257, 64), (1000, 4096)], ids=str
)
def test_entmax_on_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
    launches: Counter[str],
    num_classes: int,
    tile: int,
    alpha: float,
) -> None:
    cut(monkeypatch, tile)
    Head(num_classes).check(linear_entmax_loss, alpha=alpha)
    assert launches["candidates"] == -(-num_classes // tile)


def test_an_overflowing_buffer_falls_back_exactly(
    monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    cut(monkeypatch, 100)
    head = Head(300)
    # Every class of the first row is in the support.
    head.hidden[0] *= 1e-3
    head.bias *= 1e-3
    head.check(linear_entmax_loss, alpha=1.5)
    assert launches["candidates"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.2},
        {"softcap": 3.0},
        {"weight": torch.linspace(0.0, 2.0, 200)},
        {"label_smoothing": 0.1, "softcap": 5.0, "weight": torch.linspace(0.5, 1.0, 200)},
    ],
    ids=["smoothing", "softcap", "weights", "all"],
)
@pytest.mark.parametrize(
    ("loss", "kwargs"),
    [(linear_sparse_cross_entropy, {"k": 8}), (linear_entmax_loss, {"alpha": 1.5})],
    ids=["top-k", "entmax"],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch,
    loss: Callable[..., Tensor],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> None:
    cut(monkeypatch, 120)
    Head(200).check(loss, **kwargs, **options)


def test_an_alpha_for_each_row_and_its_gradient(
    monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    cut(monkeypatch, 150)
    head, grads = Head(300), []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "pytorch")):
        alpha = torch.tensor([1.2, 1.5, 1.9, 1.4], dtype=dtype, requires_grad=True)
        hidden, weight = head.hidden.to(dtype), head.weight.to(dtype)
        losses = linear_entmax_loss(hidden, weight, head.target, alpha, backend=backend)
        grads.append(torch.autograd.grad(losses, alpha)[0])
    assert_close_to_reference(grads[0], grads[1], kind="alpha")
    assert launches["candidates"] > 0


def test_excluded_classes_and_ties_across_tiles(
    monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    cut(monkeypatch, 30)
    head = Head(100)
    head.weight[20:70] = head.weight[20]
    head.bias[20:70] = 9.0
    head.bias[::7] = -torch.inf
    head.bias[0] = head.bias[50] = 1.0
    head.check(linear_sparse_cross_entropy, k=5)
    assert launches["top-k"] == 4


def test_a_confident_row_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a class that leads by 10 is a difference of nearly equal numbers."""
    cut(monkeypatch, 300)
    head = Head(500, torch.float16)
    head.bias[head.target[:3]] += 15.0
    head.check(linear_sparse_cross_entropy, k=16)
    head.check(linear_entmax_loss, alpha=1.5)


@pytest.mark.parametrize(
    ("loss", "kwargs"),
    [
        (sparse_cross_entropy, {"k": 4}),
        (sparse_cross_entropy, {"k": 300}),
        (sparse_cross_entropy, {"top_p": 0.8}),
        (entmax_loss, {"alpha": 1.5}),
        (entmax_loss, {"alpha": 2.0}),
    ],
    ids=["top-4", "all-classes", "top-p", "entmax15", "sparsemax"],
)
def test_losses_on_logits(loss: Callable[..., Tensor], kwargs: dict[str, Any]) -> None:
    logits = 2.0 * draw(3, 4, 300)
    target = torch.arange(12).view(3, 4) * 27
    target[1, 1] = -100
    results = []
    runs = ((torch.float32, "triton"), (torch.float64, "pytorch"), (torch.float32, "pytorch"))
    for dtype, backend in runs:
        leaf = logits.to(dtype, copy=True).requires_grad_()
        value = loss(leaf, target, backend=backend, **kwargs)
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    for place, kind in enumerate(("forward", "gradient")):
        actual, expected, same = (result[place] for result in results)
        assert_close_to_reference(actual, expected, same, kind=kind)


def test_top_k_of_logits_is_merged_by_the_kernel(launches: Counter[str]) -> None:
    sparse_cross_entropy(draw(2, 100), torch.tensor([3, 4]), k=5, backend="triton")
    assert launches["top-k"] == 1
