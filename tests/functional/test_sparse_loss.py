"""The truncated cross-entropy on logits, against its definition and F.cross_entropy."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparseformer.functional import (
    am_softmax_loss,
    entmax_loss,
    linear_cross_entropy,
    sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss.selection import top_k, top_p

FULL = [
    pytest.param({}, id="plain"),
    pytest.param({"label_smoothing": 0.1}, id="smoothing"),
    pytest.param({"weight": True}, id="weights"),
    pytest.param({"label_smoothing": 0.3, "weight": True}, id="smoothing-and-weights"),
    pytest.param({"ignored": (1, 4)}, id="ignored-rows"),
    pytest.param({"ignored": (0,), "label_smoothing": 0.1, "weight": True}, id="everything"),
]


def batch(rows: int = 6, classes: int = 9, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + classes)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(classes, (rows,), generator=generator)


def options(case: dict, target: Tensor, classes: int) -> tuple[Tensor, dict]:
    case = dict(case)
    target = target.clone()
    target[list(case.pop("ignored", ()))] = -100
    if case.pop("weight", False):
        case["weight"] = torch.linspace(0.2, 1.7, classes, dtype=torch.float64)
    return target, case


def by_definition(z: Tensor, y: int, kept: list[int], smoothing: float, weight: Tensor) -> Tensor:
    """Return one row's loss term by term, for autograd to differentiate."""
    partition = z[kept].logsumexp(0)
    loss = (1 - smoothing) * weight[y] * (partition - z[y])
    return loss + smoothing / len(kept) * sum(weight[j] * (partition - z[j]) for j in kept)


def kept_classes(z: Tensor, k: int | None, p: float | None) -> list[int]:
    order = sorted(range(len(z)), key=lambda j: (-float(z[j]), j))
    if k is not None:
        return order[:k]
    kept, mass = [], 0.0
    for j in order:
        if mass >= p:
            break
        kept.append(j)
        mass += float(z.softmax(0)[j])
    return kept


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("case", FULL)
def test_equals_cross_entropy_when_every_class_is_kept(case: dict, reduction: str) -> None:
    logits, target = batch()
    target, kwargs = options(case, target, 9)
    expected = F.cross_entropy(logits, target, reduction=reduction, **kwargs)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    for keep_all in ({"k": 9}, {"top_p": 1.0}):
        loss = sparse_cross_entropy(logits, target, reduction=reduction, **keep_all, **kwargs)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("k", "p", "smoothing"),
    [(1, None, 0.0), (2, None, 0.2), (8, None, 0.0), (None, 0.3, 0.0), (None, 0.9, 0.2)],
    ids=["k1", "k2-smoothing", "k8", "p0.3", "p0.9-smoothing"],
)
def test_truncated_loss_and_gradient_follow_the_definition(
    k: int | None, p: float | None, smoothing: float
) -> None:
    logits, target = batch(rows=7, classes=20)
    weight = torch.linspace(0.2, 1.7, 20, dtype=torch.float64)
    upstream = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    expected = torch.stack(
        [
            by_definition(z, int(y), kept_classes(z.detach(), k, p), smoothing, weight)
            for z, y in zip(logits, target, strict=True)
        ]
    )
    (expected_grad,) = torch.autograd.grad(expected @ upstream, logits)
    loss = sparse_cross_entropy(
        logits, target, k=k, top_p=p, reduction="none", label_smoothing=smoothing, weight=weight
    )
    (grad,) = torch.autograd.grad(loss @ upstream, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_default_k_is_64() -> None:
    logits, target = batch(rows=3, classes=100)
    default = sparse_cross_entropy(logits, target)
    torch.testing.assert_close(default, sparse_cross_entropy(logits, target, k=64))
    assert default != sparse_cross_entropy(logits, target, k=63)


def test_target_outside_the_top_k_is_still_pushed_up() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = sparse_cross_entropy(logits, torch.tensor([3]), k=2)
    loss.backward()
    p = 1 / (1 + math.exp(-1))
    assert loss.item() == pytest.approx(3 + math.log1p(math.exp(-1)), abs=1e-12)
    expected = torch.tensor([[p, 1 - p, 0.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize(
    ("k", "kept"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [0, 1, 2, 4])], ids=str
)
def test_ties_at_the_kth_place_go_to_the_lowest_class(k: int, kept: list[int]) -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 1.0, 5.0, -math.inf], [3.0] * 6])
    values, columns = top_k(scores, k)
    assert columns.tolist() == [kept, list(range(k))]
    assert torch.equal(values, scores.gather(-1, columns))


@pytest.mark.parametrize(
    ("p", "kept"),
    [(1e-17, [0]), (0.2, [0]), (0.25, [0]), (0.3, [0, 1]), (0.99, [0, 1, 2, 3])],
    ids=["tiny", "below-one", "exactly-one", "above-one", "nearly-all"],
)
def test_top_p_keeps_the_smallest_set_and_the_lowest_of_equals(p: float, kept: list[int]) -> None:
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5, -math.inf]], dtype=torch.float64)
    assert top_p(scores, p, scores.amax(-1)).nonzero()[:, 1].tolist() == kept


def test_top_p_is_exact_on_wide_rows_and_far_outliers() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(5, 3000, generator=generator, dtype=torch.float64)
    scores[1, :1500] = scores[1, 0]
    scores[2, 7] = -1e6
    scores[3] = 4.0
    kept = top_p(scores, 0.9, scores.amax(-1))
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = values.softmax(-1).cumsum(-1)
    count = (mass < 0.9 - 1e-12).sum(-1) + 1
    expected = torch.zeros_like(kept)
    for row, n in enumerate(count.tolist()):
        expected[row, order[row, :n]] = True
    assert torch.equal(kept, expected)


def test_gradcheck_with_distributions_weights_and_smoothing() -> None:
    logits, _ = batch(rows=3, classes=8)
    q = torch.tensor([[0.5, 0.5] + [0.0] * 6, [0.0] * 7 + [1.0], [0.125] * 8], dtype=torch.float64)
    weight = torch.linspace(0.2, 1.7, 8, dtype=torch.float64)

    def loss(z: Tensor) -> Tensor:
        return sparse_cross_entropy(z, q, k=3, reduction="none", weight=weight, label_smoothing=0.1)

    assert torch.autograd.gradcheck(loss, (logits,))


def test_distributions_equal_cross_entropy_when_every_class_is_kept() -> None:
    logits, _ = batch(rows=4, classes=7)
    q = torch.softmax(batch(rows=5, classes=7)[0][:4].detach(), -1)
    for smoothing in (0.0, 0.2):
        expected = F.cross_entropy(logits, q, label_smoothing=smoothing)
        loss = sparse_cross_entropy(logits, q, k=7, label_smoothing=smoothing)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    logits = torch.linspace(-1, 1, max(math.prod(shape), 1) * 5)[: math.prod(shape) * 5]
    logits = logits.view(*shape, 5)
    target = torch.zeros(shape, dtype=torch.int32)
    losses = sparse_cross_entropy(logits, target, k=2, reduction="none")
    assert losses.shape == shape
    if math.prod(shape):
        flat = sparse_cross_entropy(logits.reshape(-1, 5), target.reshape(-1), k=2)
        torch.testing.assert_close(losses.mean(), flat)


def test_excluded_classes_change_nothing() -> None:
    """deep-spin/entmax 9: a logit of -inf made the losses NaN."""
    logits, target = batch(rows=4, classes=5)
    wide = torch.cat([logits, torch.full((4, 3), -math.inf, dtype=torch.float64)], -1)
    for case in ({"k": 3}, {"k": 5}, {"top_p": 0.8}, {"k": 5, "label_smoothing": 0.2}):
        expected = sparse_cross_entropy(logits, target, **case)
        (expected_grad,) = torch.autograd.grad(expected, logits)
        keep = dict(case, k=8) if case.get("k") == 5 else case
        loss = sparse_cross_entropy(wide, target, **keep)
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(grad, expected_grad)


def test_a_row_without_any_class_is_zero_and_leaves_others_alone() -> None:
    """deep-spin/entmax 19: a row of -inf raised an index error."""
    logits = torch.tensor([[-math.inf] * 4, [1.0, 0.5, 0.0, -1.0]], requires_grad=True)
    target = torch.tensor([0, 0])
    for case in ({"k": 2}, {"k": 4, "label_smoothing": 0.1}, {"top_p": 0.7}):
        losses = sparse_cross_entropy(logits, target, reduction="none", **case)
        (grad,) = torch.autograd.grad(losses.sum(), logits)
        assert losses[0] == 0
        assert torch.equal(grad[0], torch.zeros(4))
        torch.testing.assert_close(losses[1], sparse_cross_entropy(logits[1], target[1], **case))


def test_an_excluded_target_has_an_infinite_loss_as_in_cross_entropy() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    assert sparse_cross_entropy(logits, torch.tensor([2]), k=2).item() == math.inf
    assert F.cross_entropy(logits, torch.tensor([2])).item() == math.inf


def test_smoothing_leaves_ignored_rows_out_of_the_sum_and_the_count() -> None:
    """pytorch 73205: label smoothing counted ignored rows."""
    logits = torch.tensor([[2.0, 0, 0, -1], [0, 1, 0, 0], [5, 5, 5, 5]], dtype=torch.float64)
    target = torch.tensor([0, 1, -100])
    smoothed = {"label_smoothing": 0.1}
    losses = [
        sparse_cross_entropy(logits, target, k=4, **smoothed),
        entmax_loss(logits, target, 1.0, **smoothed),
        linear_cross_entropy(logits, torch.eye(4, dtype=torch.float64), target, **smoothed),
    ]
    assert [loss.item() for loss in losses] == pytest.approx([0.635823375] * 3, abs=5e-10)


def test_all_rows_ignored_gives_zero_and_zero_gradients() -> None:
    """pytorch 70348: the mean over no rows was NaN."""
    logits = torch.full((3, 5), math.nan, requires_grad=True)
    target = torch.full((3,), -100)
    for weight in (None, torch.ones(5)):
        for reduction in ("mean", "sum", "none"):
            loss = sparse_cross_entropy(logits, target, k=2, weight=weight, reduction=reduction)
            (grad,) = torch.autograd.grad(loss.sum(), logits)
            assert torch.equal(loss, torch.zeros_like(loss))
            assert torch.equal(grad, torch.zeros(3, 5))


def test_ignored_rows_are_never_read() -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, math.inf]], requires_grad=True)
    loss = sparse_cross_entropy(logits, torch.tensor([0, -100]), k=2)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(logits[:1], torch.tensor([0])))
    assert torch.equal(logits.grad[1], torch.zeros(2))


@pytest.mark.parametrize("kind", ["expanded", "strided", "sparse"])
def test_unreduced_loss_takes_any_upstream_gradient(kind: str) -> None:
    """Liger-Kernel 968: every gradient was multiplied by grad_output[0]."""
    upstream = {
        "expanded": torch.tensor(0.5, dtype=torch.float64).expand(6),
        "strided": torch.arange(12, dtype=torch.float64)[::2],
        "sparse": torch.tensor([0.0, 1, 0, 0, 0, 2], dtype=torch.float64),
    }[kind]
    logits, target = batch()
    loss = sparse_cross_entropy(logits, target, k=9, reduction="none")
    (grad,) = torch.autograd.grad(loss, logits, upstream)
    expected = F.cross_entropy(logits, target, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """A target that leads by 10 has a gradient of p - 1, which cancels in half precision."""
    logits = torch.zeros(4, 50, dtype=dtype)
    logits[:, 3] = 10.0
    logits.requires_grad_()
    target = torch.full((4,), 3)
    loss = sparse_cross_entropy(logits, target, k=50)
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    F.cross_entropy(exact, target).backward()
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == dtype
    error = (logits.grad[:, 3].double() - exact.grad[:, 3]).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps * exact.grad[:, 3].abs().max()


BAD = [
    pytest.param({"k": 2, "top_p": 0.5}, "k is 2 and top_p is 0.5", id="k-and-top_p"),
    pytest.param({"k": 6}, "k is 6, but there are only 5 classes; set k to 5", id="k-too-large"),
    pytest.param({"k": 0}, "k is 0", id="k-zero"),
    pytest.param({"k": 2.0}, "k is 2.0", id="k-float"),
    pytest.param({"top_p": 0.0}, r"top_p is 0.0, but it must be in \(0, 1\]", id="top_p-zero"),
    pytest.param({"k": 2, "reduction": "avg"}, "'avg'.*none, mean, sum", id="reduction"),
    pytest.param({"k": 2, "label_smoothing": 1.5}, "label_smoothing is 1.5", id="smoothing"),
    pytest.param({"k": 2, "weight": torch.ones(4)}, r"shape \(4,\).*\(5,\)", id="weight-shape"),
    pytest.param({"k": 2, "weight": -torch.ones(5)}, "below 0", id="weight-negative"),
]


@pytest.mark.parametrize(("case", "message"), BAD)
def test_bad_arguments_are_refused_with_their_value(case: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"sparse_cross_entropy: .*{message}"):
        sparse_cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), **case)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([[0, 1], [5, 1]]), r"position \(1, 0\) is 5, but there are 5 classes"),
        (torch.tensor([[0, -1], [0, 1]]), r"position \(0, 1\) is -1"),
        (torch.tensor([0, 1]), r"shape \(2,\).*shape \(2, 2\)"),
        (torch.zeros(2, 2, dtype=torch.bool), "class ids are integers"),
        (torch.ones(2, 2, 5), r"position \(0, 0\) has the sum 5"),
        (torch.ones(2, 2), r"distributions .* have shape \(2, 2, 5\)"),
        (torch.full((2, 2, 5), 0.2).requires_grad_(), "pass target.detach"),
    ],
    ids=["above", "below", "shape", "bool", "off-simplex", "floating-ids", "differentiable"],
)
def test_bad_targets_are_refused_with_position_and_value(target: Tensor, message: str) -> None:
    """axolotl 3767: a label outside the vocabulary trained on a wrong target without an error."""
    with pytest.raises(ValueError, match=message):
        sparse_cross_entropy(torch.zeros(2, 2, 5), target, k=2)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("case", [{"k": 2}, {"top_p": 0.5}, {"k": 5}], ids=str)
def test_bad_logits_are_refused_with_position(bad: float, case: dict) -> None:
    logits = torch.zeros(2, 3, 5)
    logits[1, 2, 4] = bad
    target = torch.zeros(2, 3, dtype=torch.long)
    target[0, 1] = -100
    message = rf"sparse_cross_entropy: the logit at position \(1, 2\), class 4, is {bad}"
    with pytest.raises(ValueError, match=message):
        sparse_cross_entropy(logits, target, **case)


@pytest.mark.parametrize(
    "logits", [torch.zeros(3, 0), torch.tensor(1.0), torch.zeros(3, 2, dtype=torch.long)], ids=str
)
def test_logits_without_classes_or_of_integers_are_refused(logits: Tensor) -> None:
    with pytest.raises(ValueError, match="sparse_cross_entropy: logits ha"):
        sparse_cross_entropy(logits, torch.zeros(logits.shape[:1], dtype=torch.long), k=1)


def test_second_derivatives_are_refused_by_name() -> None:
    logits, target = batch()
    weight = torch.eye(9, dtype=torch.float64)
    for name, loss in {
        "sparse_cross_entropy": sparse_cross_entropy(logits, target, k=3),
        "linear_cross_entropy": linear_cross_entropy(logits, weight, target),
    }.items():
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
            torch.autograd.grad(loss, logits, create_graph=True)


def test_margin_softmax_is_cross_entropy_of_scaled_cosines() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (2 * torch.rand(4, 6, generator=generator, dtype=torch.float64) - 1).requires_grad_()
    target = torch.tensor([0, 5, -100, 2])
    margins = 0.2 * F.one_hot(target.clamp(min=0), 6)
    expected = F.cross_entropy(10 * (logits - margins), target, label_smoothing=0.1)
    loss = am_softmax_loss(logits, target, margin=0.2, scale=10.0, label_smoothing=0.1)
    grads = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("case", "message"),
    [({"margin": -0.1}, "margin is -0.1"), ({"scale": 0.0}, "scale is 0.0")],
    ids=["margin", "scale"],
)
def test_margin_and_scale_out_of_range_are_refused(case: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        am_softmax_loss(torch.zeros(1, 2), torch.tensor([0]), **case)
    with pytest.raises(ValueError, match="a margin needs class ids"):
        am_softmax_loss(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]))
