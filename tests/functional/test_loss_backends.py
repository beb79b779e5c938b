"""The route of the Triton kernels, with their PyTorch twins in place, and the choice of backend."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from linear_case import CLASSES, F64, LOSSES, Case, cut, draw, each_loss
from torch import Tensor

from sparseformer.functional import (
    am_softmax_loss,
    entmax_loss,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    parallel_linear_entmax_loss,
    sparse_cross_entropy,
    sparse_cross_entropy_with_stats,
)
from sparseformer.kernels import sparse_loss
from sparseformer.kernels.entmax.reference import entmax_rows
from sparseformer.kernels.sparse_loss import linear, mappings, products, rules, selection


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Take the route of the kernels on the CPU; return the names of the twins that were called."""
    called: set[str] = set()

    def watched(function):
        def call(*args):
            called.add(function.__name__)
            return function(*args)

        return call

    merge, collect = watched(selection.merge_top_k), watched(selection.collect)
    gather, segment = watched(products.gather_scale), watched(products.segment_sum)
    kernels = {
        "topk_kernel": SimpleNamespace(merge_top_k=merge, MAX_K=20),
        "candidates_kernel": SimpleNamespace(collect=collect),
        "products_kernel": SimpleNamespace(gather_scale=gather, segment_sum=segment),
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(sparse_loss, name, kernel, raising=False)
    monkeypatch.setattr(mappings, "entmax_on", lambda scores, alpha, _: entmax_rows(scores, alpha))
    choose = {"auto": "pytorch", "pytorch": "pytorch", "triton": "triton"}
    monkeypatch.setattr(rules, "choose_backend", lambda _, backend, __: choose[backend])
    return called


@each_loss
@pytest.mark.parametrize("classes", [None, 7, CLASSES - 1], ids=["whole", "7", "all-but-one"])
def test_kernel_route_equals_the_loss_on_logits(
    monkeypatch: pytest.MonkeyPatch, twins: set[str], name: str, classes: int | None
) -> None:
    if classes is not None:
        cut(monkeypatch, classes)
    case = Case(scale=4.0)
    for options in ({}, {"softcap": 3.0}):
        loss = case.linear(name, reduction="none", backend="triton", **options)
        expected = case.expected(name, reduction="none", **options)
        case.check(loss, expected)
    if name in ("top-1", "top-4"):
        assert {"merge_top_k", "gather_scale", "segment_sum"} <= twins
    if name in ("entmax-1.5", "sparsemax"):
        assert "collect" in twins


@pytest.mark.parametrize("name", ["entmax-1.5", "sparsemax"])
def test_narrow_supports_stay_sparse_on_the_kernel_route(
    monkeypatch: pytest.MonkeyPatch, twins: set[str], name: str
) -> None:
    cut(monkeypatch, classes=9)
    case = Case(scale=30.0)
    monkeypatch.setattr(linear.LinearRows, "evaluate", None)
    expected = case.expected(name)
    case.check(case.linear(name, backend="triton"), expected)
    assert twins == {"collect", "gather_scale", "segment_sum"}


def test_a_span_whose_candidates_overflow_is_evaluated_whole(
    monkeypatch: pytest.MonkeyPatch, twins: set[str]
) -> None:
    """Two tokens to a span: one with every class in its support takes the other with it only."""
    cut(monkeypatch, classes=9, tokens=2)
    case = Case(scale=30.0)
    with torch.no_grad():
        case.hidden[2] = 0.0
        case.bias.zero_()
    spans, whole = [], linear.LinearRows.evaluate

    def evaluate(rows, start: int, stop: int):
        spans.append((start, stop))
        return whole(rows, start, stop)

    monkeypatch.setattr(linear.LinearRows, "evaluate", evaluate)
    case.check(case.linear("entmax-1.5", backend="triton"), case.expected("entmax-1.5"))
    # Forward and backward; two whole rows don't fit a tile.
    assert set(spans) == {(2, 3), (3, 4)}
    assert {"gather_scale", "segment_sum"} <= twins


@pytest.mark.parametrize("kind", ["ids", "distributions"])
def test_kernel_route_on_logits_equals_pytorch(twins: set[str], kind: str) -> None:
    logits = (3 * draw(5, 300).double()).requires_grad_()
    target = torch.tensor([0, 299, -100, 7, 8])
    if kind == "distributions":
        target = draw(5, 300, seed=1).double().softmax(-1)
    alpha = torch.linspace(1.0, 2.0, 5, dtype=F64).requires_grad_()

    def check(loss, inputs: list[Tensor]) -> None:
        losses = [loss(backend=backend) for backend in ("triton", "pytorch")]
        torch.testing.assert_close(*losses, rtol=1e-11, atol=1e-11)
        grads = [torch.autograd.grad(each.sum(), inputs) for each in losses]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)

    options = {"reduction": "none", "label_smoothing": 0.1}
    for k in (3, 30):
        check(partial(sparse_cross_entropy, logits, target, k=k, **options), [logits])
    for value in (1.0, 1.5, 2.5):
        check(partial(entmax_loss, logits, target, value, **options), [logits])
    check(partial(entmax_loss, logits, target, alpha, reduction="none"), [logits, alpha])
    assert ("merge_top_k" in twins) == (kind == "ids")


def brute_candidates(scores: Tensor, reach: float) -> list[list[int]]:
    floor = scores.amax(-1, keepdim=True) - reach
    return [row.nonzero()[:, 0].tolist() for row in scores > floor]


@pytest.mark.parametrize("tile", [1, 3, 20, 64])
def test_collect_holds_what_is_near_the_maximum_so_far(tile: int) -> None:
    scores = 3 * draw(6, 50)
    scores[1] = torch.linspace(-9, 9, 50)
    scores[2, 10:] = -torch.inf
    scores[3] = -torch.inf
    scores[4] = 1.0
    top, counts = torch.full((6,), -torch.inf), torch.zeros(6, dtype=torch.int32)
    values, columns = selection.empty_top_k(6, 12, top)
    for first in range(0, 50, tile):
        part = scores[:, first : first + tile]
        selection.collect(part, first, top, 1.0, values, columns, counts)
        expected = brute_candidates(scores[:, : first + tile], 1.0)
        for row, classes in enumerate(expected):
            if row == 4 and len(classes) > 12:
                assert counts[4] == len(classes)
                continue
            assert columns[row].tolist() == classes + [-1] * (12 - len(classes))
            assert torch.equal(values[row, : len(classes)], scores[row, classes])
            assert (values[row, len(classes) :] == -torch.inf).all()
    assert counts.tolist() == [len(classes) for classes in expected]


def test_an_overflow_ends_when_the_maximum_leaves_everything_behind() -> None:
    top, counts = torch.full((1,), -torch.inf), torch.zeros(1, dtype=torch.int32)
    values, columns = selection.empty_top_k(1, 2, top)
    selection.collect(torch.zeros(1, 5), 0, top, 1.0, values, columns, counts)
    assert counts.tolist() == [5]
    selection.collect(torch.tensor([[0.5, 0.2]]), 5, top, 1.0, values, columns, counts)
    assert counts.tolist() == [7]
    selection.collect(torch.tensor([[9.0, 8.5, 1.0]]), 7, top, 1.0, values, columns, counts)
    assert counts.tolist() == [2]
    assert columns.tolist() == [[7, 8]]


@pytest.mark.parametrize("block", [4, 2**20], ids=["blocks", "one-block"])
def test_products_equal_those_of_the_dense_matrix(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(products, "BLOCK_NUMEL", block)
    columns = torch.tensor([[3, 0, -1], [8, 3, 3], [-1, -1, -1], [0, 8, 5]])
    values = draw(4, 3).double().masked_fill(columns < 0, 0.0)
    weight, hidden = draw(9, 2).double(), draw(4, 2, seed=1).double()
    dense = torch.zeros(4, 9, dtype=F64)
    for row, column in (columns >= 0).nonzero().tolist():
        dense[row, columns[row, column]] += values[row, column]
    padded = products.Padded(columns.int(), values, "pytorch")
    present = columns >= 0
    rows = present.nonzero()[:, 0].int()
    entries = products.Entries(rows, columns[present].int(), values[present])
    for matrix in (padded, entries):
        torch.testing.assert_close(matrix.times(weight, 4), dense @ weight)
        out = torch.ones(9, 2, dtype=F64)
        matrix.add_transposed_times(hidden, out)
        torch.testing.assert_close(out, 1.0 + dense.T @ hidden)
        sums = torch.ones(9, dtype=F64)
        matrix.add_column_sums(sums)
        torch.testing.assert_close(sums, 1.0 + dense.sum(0))
        scale = torch.arange(4.0, dtype=F64)
        scaled = matrix.scaled(scale).times(weight, 4)
        torch.testing.assert_close(scaled, (scale[:, None] * dense) @ weight)


CALLS = {
    "sparse_cross_entropy": lambda **o: sparse_cross_entropy(LOGITS, TARGET, k=2, **o),
    "sparse_cross_entropy_with_stats": lambda **o: sparse_cross_entropy_with_stats(
        LOGITS, TARGET, k=2, **o
    ),
    "entmax_loss": lambda **o: entmax_loss(LOGITS, TARGET, **o),
    "am_softmax_loss": lambda **o: am_softmax_loss(LOGITS, TARGET, **o),
    "linear_sparse_cross_entropy": lambda **o: linear_sparse_cross_entropy(
        LOGITS, LOGITS, TARGET, k=2, **o
    ),
    "linear_entmax_loss": lambda **o: linear_entmax_loss(LOGITS, LOGITS, TARGET, **o),
    "linear_cross_entropy": lambda **o: linear_cross_entropy(LOGITS, LOGITS, TARGET, **o),
    "parallel_linear_entmax_loss": lambda **o: parallel_linear_entmax_loss(
        LOGITS, LOGITS, TARGET, **o
    ),
}
LOGITS, TARGET = torch.eye(4), torch.arange(4)


@pytest.mark.parametrize("name", list(CALLS))
def test_a_backend_that_no_loss_has_is_refused_by_name(name: str) -> None:
    message = f"{name}: backend is 'cpp', but it must be one of 'auto', 'pytorch', 'triton'"
    with pytest.raises(ValueError, match=message):
        CALLS[name](backend="cpp")


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("parallel")])
def test_triton_without_a_gpu_is_refused_and_auto_is_pytorch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(
        "sparseformer.kernels.common.backends.is_interpreting", lambda: False, raising=True
    )
    with pytest.raises(ValueError, match=f"{name}: backend 'triton' can't serve this call"):
        CALLS[name](backend="triton")
    results = [CALLS[name](backend=backend) for backend in ("auto", "pytorch")]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_every_loss_on_hidden_states_is_covered() -> None:
    names = {function.__name__ for function, _, _ in LOSSES.values()}
    assert names <= set(CALLS)
