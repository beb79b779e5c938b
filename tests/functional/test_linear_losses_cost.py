"""The losses on hidden states: memory, what is computed at all, precision, and autograd's modes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from linear_case import CLASSES, LOSSES, Case, cut, draw
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sparseformer.functional import (
    entmax_loss,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss import linear
from sparseformer.testing import SeeInside, assert_close_to_reference, largest_tensor


@pytest.mark.parametrize("name", ["top-1", "top-4", "entmax-1.5", "sparsemax"])
def test_narrow_supports_are_found_without_a_whole_row(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cut(monkeypatch, classes=7)
    case = Case(scale=4.0)
    expected = case.expected(name)

    def refuse(*_: object) -> None:
        raise AssertionError("whole rows were computed")

    monkeypatch.setattr(linear.LinearRows, "evaluate", refuse)
    case.check(case.linear(name), expected)


def test_rows_with_a_wide_support_are_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant logits have every class in the support, which no tile's candidates can hold."""
    cut(monkeypatch, classes=7)
    case = Case(scale=0.0)
    with torch.no_grad():
        case.bias.zero_()
    case.check(case.linear("entmax-1.5"), case.expected("entmax-1.5"))


class Allocations(SeeInside):
    """Count the results of this shape that are new memory."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def see(self, func, args, kwargs):
        result = func(*args, **kwargs)
        known = {leaf.data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape == self.shape:
                self.count += leaf.data_ptr() not in known
        return result


@pytest.mark.parametrize("name", ["full", "top-4", "entmax-1.5"])
def test_a_frozen_operand_costs_neither_memory_nor_a_product(name: str) -> None:
    function, _, arguments = LOSSES[name]
    target = torch.zeros(3, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 53, generator=generator)
    weight = torch.randn(200, 53, generator=generator)
    counts = {}
    for frozen in ("none", "weight", "hidden"):
        leaves = hidden.clone(), weight.clone()
        leaves[0].requires_grad_(frozen != "hidden")
        leaves[1].requires_grad_(frozen != "weight")
        for operand, leaf in zip(("hidden", "weight"), leaves, strict=True):
            with Allocations(leaf.shape) as made:
                function(*leaves, target, **arguments).backward()
            counts[frozen, operand] = made.count
    assert counts["none", "weight"] > 0
    assert counts["none", "hidden"] > 0
    assert counts["weight", "weight"] == counts["hidden", "hidden"] == 0


@pytest.mark.parametrize("name", ["top-4", "entmax-1.5", "full", "top-p"])
def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows, classes, width, tile = 60, 3000, 4, 60_000
    monkeypatch.setattr(linear, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(linear, "TILE_LOGITS", tile)
    monkeypatch.setattr(linear, "TILE_TOKENS", 30)
    generator = torch.Generator().manual_seed(0)
    hidden = (6 * torch.randn(rows, width, generator=generator)).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).requires_grad_()
    function, _, arguments = LOSSES[name]
    target = torch.arange(rows) * 50
    with largest_tensor() as gauge:
        function(hidden, weight, target, **arguments).backward()
    assert gauge.numel <= tile, gauge
    assert rows * classes == 3 * tile


def test_a_gradient_too_dense_to_keep_is_computed_again_in_small_pieces() -> None:
    """With k just at the limit, k + 1 coefficients of a row are too many for a sparse product."""
    hidden, weight = draw(64, 3).requires_grad_(), draw(80, 3).requires_grad_()
    target = torch.arange(64)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut(monkeypatch, classes=20, tokens=64)
        with largest_tensor() as gauge:
            linear_sparse_cross_entropy(hidden, weight, target, k=10).backward()
        assert gauge.numel <= linear.TILE_LOGITS < 64 * 80, gauge
    logits = F.linear(hidden, weight)
    expected = torch.autograd.grad(sparse_cross_entropy(logits, target, k=10), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), expected)


def test_one_row_with_a_wide_support_widens_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, classes=50)
    generator = torch.Generator().manual_seed(0)
    hidden = 9 * torch.randn(40, 2, generator=generator)
    hidden[0] = 0.0
    weight = torch.randn(200, 2, generator=generator)
    target = torch.arange(40)
    with largest_tensor() as gauge:
        loss = linear_entmax_loss(hidden, weight, target)
    assert gauge.numel <= linear.TILE_LOGITS < 40 * 200, gauge
    torch.testing.assert_close(loss, entmax_loss(F.linear(hidden, weight), target))


@pytest.mark.parametrize("name", ["top-4", "entmax-1.5"])
def test_classes_off_the_support_have_no_gradient(name: str) -> None:
    case = Case(scale=6.0)
    case.linear(name).backward()
    logits = case.logits().detach().requires_grad_()
    _, on_logits, arguments = LOSSES[name]
    on_logits(logits, case.target, **arguments).backward()
    touched = logits.grad.any(0)
    assert 0 < touched.sum() < CLASSES
    assert not case.weight.grad[~touched].any()
    assert not case.bias.grad[~touched].any()


@pytest.mark.parametrize("name", ["full", "entmax-1.5"])
def test_classifier_gradient_of_a_confident_target_in_bfloat16(name: str) -> None:
    """apple/ml-cross-entropy 14: half-precision sums put the classifier's gradient far off."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(4096, 32, generator=generator)).bfloat16()
    weight[17] = hidden.detach().float().mean(0).bfloat16() * 40
    weight.requires_grad_()
    target = torch.full((64,), 17)
    function, on_logits, arguments = LOSSES[name]
    function(hidden, weight, target, **arguments).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    on_logits(F.linear(*exact), target, **arguments).backward()
    plain = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight)]
    on_logits(F.linear(*plain), target, **arguments).backward()
    for leaf, reference, baseline in zip((hidden, weight), exact, plain, strict=True):
        assert_close_to_reference(leaf.grad, reference.grad, baseline.grad, kind="gradient")


def test_autocast_computes_the_logits_in_its_dtype() -> None:
    hidden, weight = draw(4, 3).requires_grad_(), draw(50, 3).requires_grad_()
    target = torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_sparse_cross_entropy(hidden, weight, target, k=5)
        loss.backward()
    rounded = [leaf.detach().bfloat16().requires_grad_() for leaf in (hidden, weight)]
    expected = linear_sparse_cross_entropy(*rounded, target, k=5)
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert torch.equal(hidden.grad, rounded[0].grad.float())
    assert torch.equal(weight.grad, rounded[1].grad.float())


def test_backward_inside_autocast_keeps_the_precision_of_the_forward_pass() -> None:
    leaves = [draw(4, 3).requires_grad_(), draw(50, 3).requires_grad_()]
    target = torch.arange(4)
    expected = torch.autograd.grad(linear_cross_entropy(*leaves, target), leaves)
    loss = linear_cross_entropy(*leaves, target)
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))


@pytest.mark.parametrize("name", ["full", "top-4", "entmax-1.5"])
def test_checkpointing_and_no_grad_give_the_same(name: str) -> None:
    case = Case()
    expected = case.linear(name)
    with torch.no_grad():
        assert torch.equal(case.linear(name), expected)
    loss = checkpoint(lambda: case.linear(name), use_reentrant=False)
    grads = [torch.autograd.grad(value, case.leaves) for value in (loss, expected)]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_a_second_backward_needs_retain_graph() -> None:
    case = Case()
    loss = case.linear("top-4")
    loss.backward(retain_graph=True)
    first = case.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(case.weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory that torch holds at once beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        run()
    events = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_the_gauge_of_memory_sees_what_is_freed_again() -> None:
    assert 4_000_000 <= peak_bytes(lambda: torch.ones(1_000_000).sum()) < 5_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "width", "dtype", "share"),
    [
        pytest.param(50_304, 512, torch.float32, 0.1, id="50304-fp32"),
        pytest.param(131_072, 64, torch.float32, 0.1, id="131072-fp32"),
        # Tiles in two dtypes, and features of the matrix widened a few at a time.
        pytest.param(20_000, 128, torch.bfloat16, 0.4, id="20000-bf16"),
    ],
)
def test_peak_memory_is_a_small_share_of_the_logits(
    classes: int, width: int, dtype: torch.dtype, share: float
) -> None:
    rows = 1024
    hidden = (3 * draw(rows, width) / width**0.5).to(dtype).requires_grad_()
    weight = draw(classes, width, seed=1).to(dtype).requires_grad_()
    target = torch.arange(rows)

    def run() -> None:
        linear_sparse_cross_entropy(hidden, weight, target, k=64).backward()

    with torch.no_grad():
        forward = peak_bytes(lambda: linear_sparse_cross_entropy(hidden, weight, target, k=64))
    gradients = (hidden.numel() + weight.numel()) * weight.element_size()
    beyond = max(forward, peak_bytes(run) - gradients)
    assert 1_000_000 < beyond < share * rows * classes * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "top-4", "entmax-1.5"])
@pytest.mark.parametrize("chunk_size", [None, 16], ids=["whole", "chunks"])
def test_weight_gradient_of_half_precision_is_rounded_once(
    dtype: torch.dtype, name: str, chunk_size: int | None
) -> None:
    """Sums over all tokens are made in float32, so their L2 error is a single rounding's."""
    hidden = draw(256, 16).to(dtype)
    weight = (0.3 * draw(400, 16, seed=1)).to(dtype)
    function, on_logits, arguments = LOSSES[name]
    # Few classes are targets, so that many tokens meet in one row of the gradient.
    target = torch.arange(256) % 3
    exact = weight.double().requires_grad_()
    logits = hidden.double() @ exact.T
    # The logits are rounded to half precision in every version; only the sums are compared.
    logits = logits + (F.linear(hidden, weight).double() - logits).detach()
    on_logits(logits, target, reduction="sum", **arguments).backward()
    plain, ours = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    on_logits(F.linear(hidden, plain), target, reduction="sum", **arguments).backward()
    options = {**arguments, "reduction": "sum", "chunk_size": chunk_size}
    function(hidden, ours, target, **options).backward()
    assert ours.grad.dtype == dtype
    errors = [float((leaf.grad.double() - exact.grad).norm()) for leaf in (ours, plain)]
    assert errors[0] <= 3 * errors[1]
    rounding = float((exact.grad.to(dtype).double() - exact.grad).norm())
    assert errors[0] <= 1.01 * rounding
