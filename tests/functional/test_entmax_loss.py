"""The Fenchel-Young losses of entmax on logits, against definitions and the entmax package."""

import math
from typing import Any

import entmax as peer
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseformer.functional import entmax, entmax15_loss, entmax_loss, sparsemax_loss
from sparseformer.kernels.sparse_loss.entropy import entropy_slope, tsallis_entropy
from sparseformer.testing import assert_close_to_reference

F64 = torch.float64
ALPHAS = [1.0, 1.001, 1.05, 1.333, 1.5, 1.9, 2.0]


def batch(rows: int = 5, classes: int = 12, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=F64)
    return logits.requires_grad_(), torch.randint(classes, (rows,), generator=generator)


def simplex(rows: int, classes: int) -> Tensor:
    """Return sparse distributions, the first one-hot."""
    q = torch.zeros(rows, classes, dtype=F64)
    for row in range(rows):
        q[row, : row + 1] = torch.linspace(1, 2, row + 1, dtype=F64)
    return q / q.sum(-1, keepdim=True)


def by_definition(z: Tensor, q: Tensor, alpha: float) -> Tensor:
    """Return <p, z> + H(p) - <q, z> - H(q) with the entropy as the papers write it."""

    def entropy(p: Tensor) -> Tensor:
        if alpha == 1.0:
            return -torch.xlogy(p, p).sum(-1)
        return (1 - p.pow(alpha).sum(-1)) / (alpha * (alpha - 1))

    p = entmax(z.detach(), alpha)
    return (p * z).sum(-1) + entropy(p) - (q * z).sum(-1) - entropy(q)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", ["ids", "distributions"])
def test_loss_and_gradient_follow_the_definition(alpha: float, kind: str) -> None:
    logits, target = batch()
    q = F.one_hot(target, 12).double() if kind == "ids" else simplex(5, 12)
    loss = entmax_loss(logits, target if kind == "ids" else q, alpha, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    # Near alpha = 1 it is the definition that loses digits.
    tolerance = 1e-9 if alpha == 1.001 else 1e-12
    torch.testing.assert_close(loss, by_definition(logits, q, alpha), rtol=0, atol=tolerance)
    torch.testing.assert_close(grad, entmax(logits.detach(), alpha) - q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "bisect-1.3"])
def test_equals_the_entmax_package(name: str, reduction: str) -> None:
    logits, target = batch(rows=6)
    # The package wants the id of ignored rows to be a class, too.
    ignored = int(target[2])
    theirs = {
        "sparsemax": peer.SparsemaxLoss(ignore_index=ignored, reduction="none"),
        "entmax15": peer.Entmax15Loss(ignore_index=ignored, reduction="none"),
        "bisect-1.3": peer.EntmaxBisectLoss(1.3, 100, ignore_index=ignored, reduction="none"),
    }[name]
    losses = theirs(logits, target)
    counted = int((target != ignored).sum())
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted}[reduction]
    alpha = {"sparsemax": 2.0, "entmax15": 1.5, "bisect-1.3": 1.3}[name]
    loss = entmax_loss(logits, target, alpha, ignore_index=ignored, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(value.sum(), logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_named_losses_are_entmax_losses() -> None:
    logits, target = batch()
    weight = torch.linspace(0.2, 1.7, 12, dtype=F64)
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": "none"}
    for loss, alpha in ((sparsemax_loss, 2.0), (entmax15_loss, 1.5)):
        expected = entmax_loss(logits, target, alpha, **options)
        assert torch.equal(loss(logits, target, **options), expected)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"label_smoothing": 0.1}, {"weight": True}, {"label_smoothing": 0.2, "weight": True}],
    ids=["plain", "smoothing", "weights", "both"],
)
def test_alpha_one_is_cross_entropy(kwargs: dict) -> None:
    logits, target = batch()
    target[1] = -100
    if kwargs.get("weight"):
        kwargs = {**kwargs, "weight": torch.linspace(0.2, 1.7, 12, dtype=F64)}
    for alpha in (1.0, torch.tensor(1.0), torch.ones(5, dtype=F64)):
        loss = entmax_loss(logits, target, alpha, **kwargs)
        expected = F.cross_entropy(logits, target, **kwargs)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("kind", ["ids", "distributions"])
def test_smoothing_averages_the_losses_of_all_classes(alpha: float, kind: str) -> None:
    logits, target = batch()
    target = target if kind == "ids" else simplex(5, 12)
    plain = entmax_loss(logits, target, alpha, reduction="none")
    classes = torch.arange(12).expand(5, 12)
    every = entmax_loss(logits[:, None].expand(5, 12, 12), classes, alpha, reduction="none").mean(
        -1
    )
    loss = entmax_loss(logits, target, alpha, reduction="none", label_smoothing=0.3)
    torch.testing.assert_close(loss, 0.7 * plain + 0.3 * every)


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        (entmax15_loss, 0.203261321, [-0.375802471, 0.291666667, 0.084135804, 0.0]),
        (sparsemax_loss, 0.0625, [-0.25, 0.25, 0.0, 0.0]),
    ],
    ids=["entmax15", "sparsemax"],
)
def test_excluded_class_gives_the_loss_of_the_sliced_logits(
    loss, value: float, gradient: list[float]
) -> None:
    """deep-spin/entmax 9: a logit of -inf made the losses NaN."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -math.inf]], dtype=F64, requires_grad=True)
    result = loss(logits, torch.tensor([0]))
    result.backward()
    assert result.item() == pytest.approx(value, abs=5e-10)
    assert logits.grad[0].tolist() == pytest.approx(gradient, abs=5e-10)
    smoothed = [
        entmax_loss(z, torch.tensor([0]), 1.4, label_smoothing=0.2) for z in (logits, logits[:, :3])
    ]
    torch.testing.assert_close(*smoothed)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_a_row_without_any_class_is_zero_and_leaves_others_alone(alpha: float) -> None:
    """deep-spin/entmax 19: a row of -inf raised an index error, or gave NaN."""
    logits = torch.tensor([[-math.inf] * 4, [1.0, 0.5, 0.0, -1.0]], dtype=F64, requires_grad=True)
    rows_alpha = torch.full((2,), alpha, dtype=F64, requires_grad=True)
    uniform = torch.full((2, 4), 0.25, dtype=F64)
    for target in (torch.tensor([0, 0]), uniform):
        losses = entmax_loss(logits, target, rows_alpha, reduction="none")
        grad, alpha_grad = torch.autograd.grad(losses.sum(), (logits, rows_alpha))
        assert losses[0] == 0
        assert alpha_grad[0] == 0
        assert torch.equal(grad[0], torch.zeros(4, dtype=F64))
        alone = entmax_loss(logits[1:], target[1:], alpha)
        torch.testing.assert_close(losses[1], alone)
    if alpha == 1.5:
        expected = [0.624197529 - 0.25, 0.291666667 - 0.25, 0.084135804 - 0.25, -0.25]
        assert grad[1].tolist() == pytest.approx(expected, abs=5e-10)


@pytest.mark.parametrize("loss", [entmax15_loss, sparsemax_loss], ids=["entmax15", "sparsemax"])
def test_a_target_off_the_support_has_a_finite_positive_loss(loss) -> None:
    """SparseMax.torch 2: minus the sparsemax output was taken for a loss, and fell below 0."""
    logits = torch.tensor([[4.0, 0.0, 0.0]], dtype=F64, requires_grad=True)
    result = loss(logits, torch.tensor([1]))
    result.backward()
    assert result.item() == pytest.approx(4.0, abs=1e-12)
    assert logits.grad[0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-12)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=2, max_size=9),
    alpha=st.one_of(st.floats(1.0, 2.0), st.sampled_from([1.5, 2.0])),
    data=st.data(),
)
def test_loss_is_never_negative_and_zero_from_the_margin_on(
    logits: list[float], alpha: float, data: st.DataObject
) -> None:
    z = torch.tensor([logits], dtype=F64)
    y = data.draw(st.integers(0, len(logits) - 1))
    assert entmax_loss(z, torch.tensor([y]), alpha).item() >= -1e-13
    if alpha < 1.1:
        return
    lead = z.clone()
    lead[0, y] = z.max() + 1 / (alpha - 1)
    assert entmax_loss(lead, torch.tensor([y]), alpha).item() == pytest.approx(0, abs=1e-12)
    others = torch.cat([z[0, :y], z[0, y + 1 :]])
    lead[0, y] = others.max() + 0.8 / (alpha - 1)
    assert entmax_loss(lead, torch.tensor([y]), alpha).item() > 1e-9


@pytest.mark.parametrize("kind", ["ids", "distributions", "everything"])
@pytest.mark.parametrize("alpha", [1.0005, 1.25, 1.7])
def test_gradcheck_in_logits_and_alpha(alpha: float, kind: str) -> None:
    logits, target = batch(rows=3, classes=7)
    weight = torch.linspace(0.2, 1.7, 7, dtype=F64)
    target = target if kind == "ids" else simplex(3, 7)
    extra = {"weight": weight, "label_smoothing": 0.2} if kind == "everything" else {}
    per_row = torch.tensor([alpha, 1.4, 1.9], dtype=F64, requires_grad=True)
    shared = torch.tensor(alpha, dtype=F64, requires_grad=True)
    for learned in (per_row, shared):
        assert torch.autograd.gradcheck(
            lambda z, a: entmax_loss(z, target, a, reduction="none", **extra), (logits, learned)
        )


def test_alpha_gradient_at_one_is_the_limit() -> None:
    """The textbook form divides by (alpha - 1)^2."""
    logits, target = batch()
    one = torch.tensor(1.0, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(entmax_loss(logits, target, one), one)
    values = [entmax_loss(logits, target, 1.0 + step).item() for step in (0.0, 1e-4, 2e-4)]
    assert slope.item() == pytest.approx(
        (-3 * values[0] + 4 * values[1] - values[2]) / 2e-4, rel=1e-6
    )


def test_wide_rows_with_a_narrow_support_have_the_gradient_of_the_whole_row() -> None:
    """Only candidates near the maximum are solved for when there are many classes."""
    logits, target = batch(rows=4, classes=700, scale=3.0)
    alphas = torch.tensor([1.3, 1.5, 1.8, 2.0], dtype=F64, requires_grad=True)
    for kwargs in ({}, {"label_smoothing": 0.1}):
        loss = entmax_loss(logits, target, alphas, reduction="none", **kwargs)
        grads = torch.autograd.grad(loss.sum(), (logits, alphas))
        assert (grads[0][0] == 0).any() != bool(kwargs)
        for row, alpha in enumerate(alphas.tolist()):
            p = entmax(logits[row].detach(), alpha)
            q = F.one_hot(target[row], 700).double()
            q = 0.9 * q + 0.1 / 700 if kwargs else q
            torch.testing.assert_close(grads[0][row], p - q, rtol=0, atol=1e-12)
            entropy = tsallis_entropy(p[None], alpha)
            slope = entropy_slope(p[None], entropy, alpha)
            torch.testing.assert_close(grads[1][row, None], slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.7, 2.0, 4.0])
def test_low_precision_is_as_exact_as_its_dtype(dtype: torch.dtype, alpha: float) -> None:
    logits = batch(rows=8, classes=300)[0].detach().to(dtype).requires_grad_()
    target = torch.arange(8) * 30
    exact = logits.detach().double().requires_grad_()
    reference = entmax_loss(exact, target, alpha)
    (reference_grad,) = torch.autograd.grad(reference, exact)
    loss = entmax_loss(logits, target, alpha)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    assert_close_to_reference(loss, reference)
    assert_close_to_reference(grad, reference_grad, kind="gradient")


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_logits_keep_the_digits_of_their_differences(offset: float) -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]])
    for alpha in (1.0, 1.2, 1.5, 2.0):
        shifted = entmax_loss(logits + offset, torch.tensor([1]), alpha)
        torch.testing.assert_close(shifted, entmax_loss(logits, torch.tensor([1]), alpha))


@pytest.mark.parametrize("alpha", [2.5, 4.0])
def test_alpha_above_two(alpha: float) -> None:
    logits, target = batch()
    loss = entmax_loss(logits, target, alpha, reduction="none")
    expected = by_definition(logits, F.one_hot(target, 12).double(), alpha)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", [4.0, 10.0])
def test_gradient_above_two_keeps_its_digits_in_float32(alpha: float) -> None:
    """deep-spin/entmax 36: p is a steep function of t there, and float32 was off by up to 0.14."""
    lead = torch.linspace(-1, 1, 2001)
    logits = torch.stack([lead, torch.zeros_like(lead)], -1).requires_grad_()
    target = torch.zeros(2001, dtype=torch.long)
    exact = logits.detach().double().requires_grad_()
    grads = [
        torch.autograd.grad(entmax_loss(z, target, alpha, reduction="sum"), z)[0]
        for z in (logits, exact)
    ]
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=0, atol=1e-6)


def test_loss_falls_as_alpha_rises() -> None:
    """So a learned alpha of a loss climbs to its upper end; EntmaxLoss says how to use that."""
    logits, target = batch(rows=40)
    grid = torch.linspace(1, 2, 21, dtype=F64)
    losses = torch.stack([entmax_loss(logits, target, a, reduction="none") for a in grid])
    assert (losses.diff(dim=0) <= 1e-12).all()
    slope = torch.ones(40, dtype=F64, requires_grad=True)
    entmax_loss(logits, target, slope, reduction="sum").backward()
    assert (slope.grad < 0).all()


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (0.5, "alpha is 0.5, but it must be finite and at least 1"),
        (math.nan, "alpha is nan"),
        (torch.tensor([1.5, 0.9]), "alpha has the entry 0.89"),
        (torch.ones(3), r"alpha has shape \(3,\), but it must broadcast to \(2,\)"),
        (torch.ones(2, 2), r"alpha has shape \(2, 2\)"),
        (torch.tensor(2), "alpha has dtype torch.int64"),
    ],
    ids=["low", "nan", "entry", "shape", "rank", "integer"],
)
def test_bad_alpha_is_refused(alpha: float | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"entmax_loss: {message}"):
        entmax_loss(torch.zeros(2, 4), torch.tensor([0, 1]), alpha)


def test_bad_logits_are_refused_by_the_function_that_was_called() -> None:
    for name, loss in {"sparsemax_loss": sparsemax_loss, "entmax15_loss": entmax15_loss}.items():
        with pytest.raises(ValueError, match=rf"{name}: the logit at position \(0,\), class 1"):
            loss(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))


@pytest.mark.parametrize("alpha", [1.5, 2.0, torch.tensor(1.5)], ids=["1.5", "2", "tensor"])
def test_a_logit_far_above_the_rest_on_the_target_costs_nothing(alpha: Any) -> None:
    """In fp32 1e8 - 1 / (alpha - 1) is 1e8 again, and no class was found to be in reach of it."""
    logits = torch.zeros(1, 300)
    logits[0, 7] = 1e8
    assert entmax_loss(logits, torch.tensor([7]), alpha).item() == 0.0
    other = entmax_loss(logits, torch.tensor([8]), alpha).item()
    assert other == pytest.approx(1e8)
