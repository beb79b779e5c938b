"""The losses on hidden states equal those on logits, for any tiling, and refuse bad input."""

import math

import pytest
import torch
import torch.nn.functional as F
from linear_case import CLASSES, F64, LOSSES, PER_ROW, ROWS, Case, cut, draw, each_loss
from torch import Tensor

from sparseformer.functional import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
)


@each_loss
def test_all_at_once_equals_the_loss_on_logits(name: str) -> None:
    case = Case()
    case.check(case.linear(name, reduction="none"), case.expected(name, reduction="none"))


@each_loss
@pytest.mark.parametrize("classes", [1, 2, 7, CLASSES - 1, CLASSES, CLASSES + 1])
def test_any_tile_of_classes_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, classes: int
) -> None:
    cut(monkeypatch, classes)
    case = Case()
    case.check(case.linear(name, reduction="none"), case.expected(name, reduction="none"))


@each_loss
@pytest.mark.parametrize("chunk_size", [1, 2, ROWS - 1, ROWS, ROWS + 1])
def test_any_chunk_of_tokens_gives_the_same(name: str, chunk_size: int) -> None:
    case = Case()
    case.check(case.linear(name, chunk_size=chunk_size), case.expected(name))


@each_loss
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
def test_softcap_smoothing_and_weights_together(
    monkeypatch: pytest.MonkeyPatch, name: str, tiled: bool
) -> None:
    if tiled:
        cut(monkeypatch, classes=9)
    case = Case(scale=4.0)
    weight = torch.linspace(0.2, 1.7, CLASSES, dtype=F64)
    options = {"softcap": 3.0, "label_smoothing": 0.2, "weight": weight}
    for reduction in ("mean", "sum", "none"):
        loss = case.linear(name, reduction=reduction, **options)
        case.check(loss, case.expected(name, reduction=reduction, **options))


@pytest.mark.parametrize("name", ["full", "top-4", "top-p", "entmax-1.5"])
def test_gradcheck_in_input_weight_and_bias(name: str) -> None:
    function, _, arguments = LOSSES[name]
    case = Case()
    leaves = [leaf.detach()[:13].clone().requires_grad_() for leaf in case.leaves]
    target = case.target.clamp(max=12)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {"softcap": 5.0, "reduction": "none"}
        return function(hidden, weight, target, linear_bias=bias, **arguments, **options)

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
@pytest.mark.parametrize("kind", ["one", "per-row"])
def test_gradcheck_in_alpha(monkeypatch: pytest.MonkeyPatch, kind: str, tiled: bool) -> None:
    if tiled:
        cut(monkeypatch, classes=9)
    case = Case()
    alpha = torch.tensor(1.3, dtype=F64) if kind == "one" else PER_ROW.clamp(1.05, 1.95)

    def loss(a: Tensor, hidden: Tensor) -> Tensor:
        return linear_entmax_loss(hidden, case.weight, case.target, a, reduction="none")

    assert torch.autograd.gradcheck(loss, (alpha.clone().requires_grad_(), case.hidden))


@pytest.mark.parametrize("name", ["full", "top-4", "entmax-1.5"])
def test_unreduced_loss_weighs_every_row_by_its_own_upstream_gradient(name: str) -> None:
    """Liger-Kernel 968: every gradient was multiplied by grad_output[0], so these were all 0."""
    hidden = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=F64, requires_grad=True)
    weight = torch.linspace(-1, 1, 80, dtype=F64).view(40, 2).requires_grad_()
    function, on_logits, arguments = LOSSES[name]
    target = torch.tensor([3, 8])
    upstream = torch.tensor([0.0, 1.0], dtype=F64)
    losses = function(hidden, weight, target, reduction="none", **arguments)
    assert losses.shape == (2,)
    grads = torch.autograd.grad(losses, (hidden, weight), upstream)
    expected = on_logits(F.linear(hidden, weight), target, reduction="none", **arguments)
    wanted = torch.autograd.grad(expected, (hidden, weight), upstream)
    assert grads[0][1].abs().min() > 0
    torch.testing.assert_close(grads, wanted)


@each_loss
@pytest.mark.parametrize("needed", [0, 1, 2], ids=["input", "weight", "bias"])
def test_one_gradient_alone_is_right(name: str, needed: int) -> None:
    case = Case()
    for place, leaf in enumerate(case.leaves):
        leaf.requires_grad_(place == needed)
    leaf = case.leaves[needed]
    grads = [
        torch.autograd.grad(loss, leaf)[0] for loss in (case.linear(name), case.expected(name))
    ]
    torch.testing.assert_close(*grads)


@each_loss
def test_all_rows_ignored_gives_zero_and_zero_gradients(name: str) -> None:
    """pytorch 70348: the mean over no rows was NaN."""
    case = Case()
    case.target[:] = -100
    for reduction in ("mean", "sum", "none"):
        loss = case.linear(name, reduction=reduction).sum()
        assert loss == 0
        for grad in torch.autograd.grad(loss, case.leaves):
            assert not grad.any()


def test_ignored_rows_are_never_computed() -> None:
    case = Case()
    hidden = case.hidden.detach().clone()
    hidden[4] = math.nan
    hidden.requires_grad_()
    loss = linear_entmax_loss(hidden, case.weight, case.target, linear_bias=case.bias)
    loss.backward()
    torch.testing.assert_close(loss, case.expected("entmax-1.5"))
    assert not hidden.grad[4].any()


@pytest.mark.parametrize("name", ["full", "top-4", "top-p", "entmax-1.5"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
def test_a_bias_of_minus_infinity_excludes_a_class(
    monkeypatch: pytest.MonkeyPatch, name: str, softcap: float | None, tiled: bool
) -> None:
    if tiled:
        cut(monkeypatch, classes=9)
    case = Case()
    excluded = torch.arange(CLASSES) % 3 == 1
    excluded[case.target.clamp(min=0)] = False
    bias = case.bias.detach().masked_fill(excluded, -math.inf)
    function, on_logits, arguments = LOSSES[name]
    options = {"softcap": softcap, "linear_bias": bias}
    loss = function(case.hidden, case.weight, case.target, **arguments, **options)
    logits = case.logits(softcap).masked_fill(excluded, -math.inf)
    expected = on_logits(logits, case.target, **arguments)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, (case.hidden, case.weight))
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (case.hidden, case.weight)))
    assert not grads[1][excluded].any()


@pytest.mark.parametrize("classes", [2, 3, 5, 8])
def test_classes_beyond_the_last_tile_add_nothing(
    monkeypatch: pytest.MonkeyPatch, classes: int
) -> None:
    """verl 2899: a vocabulary that isn't a multiple of the tile got phantom logits of 0."""
    cut(monkeypatch, classes, tokens=1)
    hidden, weight = torch.full((1, 1), -10.0), torch.ones(5, 1)
    target = torch.tensor([0])
    for loss in (
        linear_cross_entropy(hidden, weight, target),
        linear_sparse_cross_entropy(hidden, weight, target, k=5),
        linear_entmax_loss(hidden, weight, target, 1.0),
    ):
        assert loss.item() == pytest.approx(1.609437912, abs=5e-7)


@pytest.mark.parametrize("classes", [2, 3, 7, 40])
def test_ties_across_tiles_go_to_the_lowest_class(
    monkeypatch: pytest.MonkeyPatch, classes: int
) -> None:
    cut(monkeypatch, classes, tokens=1)
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.full((40, 1), 2.0)
    weight[::7] = 1.0
    weight.requires_grad_()
    linear_sparse_cross_entropy(hidden, weight, torch.tensor([39]), k=3).backward()
    assert weight.grad[:, 0].nonzero()[:, 0].tolist() == [1, 2, 3, 39]


@pytest.mark.parametrize("lead", [(), (2, 3), (3, 1, 2), (0,)], ids=str)
def test_any_leading_shape_and_strides(lead: tuple[int, ...]) -> None:
    hidden = draw(*lead, 8)[..., ::2]
    weight = draw(4, 30).T
    target = torch.zeros(lead, dtype=torch.long)
    losses = linear_sparse_cross_entropy(hidden, weight, target, k=2, reduction="none")
    assert losses.shape == lead
    expected = sparse_cross_entropy(F.linear(hidden, weight), target, k=2, reduction="none")
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("bad", [5, -1], ids=["above", "below"])
def test_target_out_of_range_is_named(bad: int) -> None:
    """axolotl 3767: a label outside the vocabulary trained on a wrong target without an error."""
    target = torch.tensor([bad, 1])
    message = rf"linear_entmax_loss: target at position \(0,\) is {bad}, but there are 5 classes"
    with pytest.raises(ValueError, match=message):
        linear_entmax_loss(torch.zeros(2, 3), torch.zeros(5, 3), target)


@pytest.mark.parametrize("name", ["full", "top-4", "top-p", "entmax-1.5"])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
def test_logits_that_overflow_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, tiled: bool
) -> None:
    if tiled:
        cut(monkeypatch, classes=9)
    case = Case()
    with torch.no_grad():
        case.weight[33] = math.inf
        case.hidden[:5] = -case.hidden[:5].abs()
        case.hidden[5] = case.hidden[5].abs()
    message = (
        r"the logit at position \(5,\), class 33, is inf.*input, linear_weight and linear_bias"
    )
    with pytest.raises(ValueError, match=message):
        case.linear(name)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"linear_weight": torch.zeros(5, 4)}, r"input has shape \(2, 3\), but .* 4 features"),
        ({"linear_weight": torch.zeros(5, 0)}, "at least one of each"),
        ({"linear_weight": torch.zeros(5)}, r"linear_weight has shape \(5,\)"),
        ({"linear_weight": torch.zeros(5, 3).half()}, "float16 and input torch.float32"),
        ({"linear_bias": torch.zeros(4)}, r"linear_bias has shape \(4,\)"),
        ({"k": 9}, "k is 9, but there are only 5 classes"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"target": torch.full((2, 5), 0.2)}, "use the loss on logits for distributions"),
        ({"target": torch.zeros(2, dtype=torch.long, device="meta")}, "target is on meta"),
        ({"input": torch.zeros(2, 3, dtype=torch.long)}, "input has dtype torch.int64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused_with_their_value(kwargs: dict, message: str) -> None:
    arguments = {
        "input": torch.zeros(2, 3),
        "linear_weight": torch.zeros(5, 3),
        "target": torch.zeros(2, dtype=torch.long),
        "k": 2,
    }
    with pytest.raises(ValueError, match=f"linear_sparse_cross_entropy: .*{message}"):
        linear_sparse_cross_entropy(**{**arguments, **kwargs})
