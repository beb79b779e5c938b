"""The losses as torch operators: opcheck, torch.compile without graph breaks, eager's results."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_case import cut, draw
from torch import Tensor, nn

from sparseformer.functional import (
    am_softmax_loss,
    entmax15_loss,
    entmax_loss,
    entmax_loss_with_stats,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    linear_sparse_cross_entropy_with_stats,
    sparse_cross_entropy,
    sparsemax_loss,
)
from sparseformer.kernels.sparse_loss.rules import Rule

ROWS, WIDTH, CLASSES = 6, 5, 300
TARGET = torch.tensor([0, CLASSES - 1, 7, -100, 8, 20])

RULES = [
    pytest.param(Rule("f", k=4), None, id="top-k"),
    pytest.param(Rule("f", top_p=0.7, label_smoothing=0.1), None, id="top-p"),
    pytest.param(Rule("f", alpha=1.0), None, id="softmax"),
    pytest.param(Rule("f", alpha=1.5), None, id="entmax"),
    pytest.param(Rule("f", alpha=2.0, softcap=3.0), None, id="sparsemax"),
    pytest.param(Rule("f"), (), id="one-alpha"),
    pytest.param(Rule("f", label_smoothing=0.2), (ROWS,), id="alpha-of-rows"),
]


def operands(rank: int, alpha_shape: tuple[int, ...] | None) -> list[Tensor | None]:
    """Return logits, or hidden states with a matrix and a bias, then alpha, target, weight."""
    heads = [draw(ROWS, CLASSES)] if rank == 1 else [draw(ROWS, WIDTH), draw(CLASSES, WIDTH)]
    leaves = [(3 * head).requires_grad_() for head in heads]
    bias = [] if rank == 1 else [draw(CLASSES).requires_grad_()]
    alpha = None
    if alpha_shape is not None:
        alpha = torch.full(alpha_shape, 1.6).requires_grad_()
    return [*leaves, *bias, alpha, TARGET.clone(), torch.linspace(0.5, 1.5, CLASSES)]


@pytest.mark.parametrize(("rule", "alpha_shape"), RULES)
@pytest.mark.parametrize("operator", ["logits_loss", "linear_loss"])
def test_opcheck_finds_no_fault(
    operator: str, rule: Rule, alpha_shape: tuple[int, ...] | None
) -> None:
    """It compares schema, fakes, autograd registration and the traced gradient with eager."""
    arguments = operands(1 if operator == "logits_loss" else 2, alpha_shape)
    call = getattr(torch.ops.sparseformer, operator).default
    wanted = [True, alpha_shape is not None, True]
    torch.library.opcheck(call, (*arguments, *rule.settings, wanted))


@pytest.mark.parametrize(
    "change",
    ["frozen", "half", "strided", "no-rows", "ignored", "distributions"],
)
def test_opcheck_finds_no_fault_with_unusual_operands(change: str) -> None:
    logits, alpha, target, weight = operands(1, None)
    wanted = [True, False, False]
    if change == "frozen":
        logits, wanted = logits.detach(), [False, False, False]
    elif change == "half":
        logits = logits.detach().half().requires_grad_()
    elif change == "strided":
        logits = draw(CLASSES, 2 * ROWS).T[::2].requires_grad_()
    elif change == "no-rows":
        logits, target = logits[:0].detach().requires_grad_(), target[:0]
    elif change == "ignored":
        target = torch.full_like(target, -100)
    else:
        target = logits.detach().softmax(-1)
    call = torch.ops.sparseformer.logits_loss.default
    settings = Rule("f", k=4).settings
    torch.library.opcheck(call, (logits, alpha, target, weight, *settings, wanted))


class Model(nn.Module):
    """A layer and a loss on its output, with whatever the loss learns."""

    def __init__(self, loss: Callable[..., Tensor], is_linear: bool, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(2 * torch.randn(CLASSES, WIDTH, generator=generator))
        self.alpha = nn.Parameter(torch.tensor(1.4))
        self.loss, self.is_linear, self.options = loss, is_linear, options

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        hidden = 1.5 * hidden
        options = dict(self.options)
        if options.pop("learned", False):
            options["alpha"] = self.alpha
        if self.is_linear:
            return 2.0 * self.loss(hidden, self.weight, target, **options)
        return 2.0 * self.loss(hidden @ self.weight.T, target, **options)


MODELS = {
    "top-k": (sparse_cross_entropy, False, {"k": 4}),
    "top-p": (sparse_cross_entropy, False, {"top_p": 0.8, "label_smoothing": 0.1}),
    "entmax": (entmax_loss, False, {"alpha": 1.3, "reduction": "sum"}),
    "learned-alpha": (entmax_loss, False, {"learned": True}),
    "sparsemax": (sparsemax_loss, False, {"weight": torch.linspace(0.5, 2, CLASSES)}),
    "entmax15": (entmax15_loss, False, {}),
    "margin": (am_softmax_loss, False, {"scale": 5.0}),
    "linear-full": (linear_cross_entropy, True, {}),
    "linear-top-k": (linear_sparse_cross_entropy, True, {"k": 4, "softcap": 9.0}),
    "linear-entmax": (linear_entmax_loss, True, {"alpha": 1.7}),
    "linear-chunks": (linear_entmax_loss, True, {"alpha": 1.1, "chunk_size": 2}),
    "linear-learned-alpha": (linear_entmax_loss, True, {"learned": True}),
}


def check_compiled(model: Model, compiled: Any, hidden: Tensor, target: Tensor) -> None:
    """Compare value and gradients with eager's."""
    leaves = [hidden, model.weight]
    if model.options.get("learned"):
        leaves.append(model.alpha)
    losses = [call(hidden, target) for call in (compiled, model)]
    torch.testing.assert_close(*losses)
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_compiled_model_has_one_graph_and_the_results_of_eager(name: str) -> None:
    model = Model(*MODELS[name][:2], **MODELS[name][2])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    check_compiled(model, compiled, draw(ROWS, WIDTH).requires_grad_(), TARGET)


@pytest.mark.slow
# What torch itself warns about when inductor is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_inductor_compiles_forward_and_backward() -> None:
    for name in ("linear-top-k", "learned-alpha"):
        model = Model(*MODELS[name][:2], **MODELS[name][2])
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        check_compiled(model, compiled, draw(ROWS, WIDTH).requires_grad_(), TARGET)


@pytest.mark.parametrize("name", ["top-k", "linear-entmax"])
def test_other_batch_sizes_and_counts_of_rows_need_one_graph_more_at_most(name: str) -> None:
    model = Model(*MODELS[name][:2], **MODELS[name][2])
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (6, 11, 20):
        target = torch.arange(rows)
        target[: rows // 3] = -100
        check_compiled(model, compiled, draw(rows, WIDTH).requires_grad_(), target)
    assert counter.frame_count <= 2


def test_compiled_code_refuses_bad_values_by_name() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sparse_cross_entropy, fullgraph=True, backend="aot_eager")
    target = torch.tensor([0, 1])
    assert compiled(torch.zeros(2, 9), target, k=3).item() == pytest.approx(math.log(3), abs=1e-6)
    logits = torch.zeros(2, 9)
    logits[1, 4] = math.nan
    with pytest.raises(ValueError, match=r"logit at position \(1,\), class 4, is nan"):
        compiled(logits, target, k=3)
    with pytest.raises(ValueError, match=r"target at position \(1,\) is 9"):
        compiled(torch.zeros(2, 9), torch.tensor([0, 9]), k=3)


def test_compiled_statistics_equal_eager() -> None:
    torch._dynamo.reset()
    hidden, weight = draw(ROWS, WIDTH), draw(CLASSES, WIDTH)
    logits = hidden @ weight.T
    for function, arguments in (
        (entmax_loss_with_stats, (logits, TARGET, 1.5)),
        (linear_sparse_cross_entropy_with_stats, (hidden, weight, TARGET)),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        (loss, stats), (expected, wanted) = compiled(*arguments), function(*arguments)
        torch.testing.assert_close((loss, *stats), (expected, *wanted))


def test_tiles_of_classes_and_spans_computed_again_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(monkeypatch, classes=70, tokens=4)
    for name in ("linear-top-k", "linear-entmax", "linear-full"):
        model = Model(*MODELS[name][:2], **MODELS[name][2])
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        check_compiled(model, compiled, draw(ROWS, WIDTH).requires_grad_(), TARGET)


@pytest.mark.parametrize("name", ["entmax", "linear-top-k"])
def test_no_gradient_is_computed_for_what_is_frozen(name: str) -> None:
    model = Model(*MODELS[name][:2], **MODELS[name][2])
    model.requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    hidden = draw(ROWS, WIDTH)
    assert not compiled(hidden, TARGET).requires_grad
    torch.testing.assert_close(compiled(hidden, TARGET), model(hidden, TARGET))
