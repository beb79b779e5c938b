"""What a loss says about its rows: kept classes, whether the target is kept, accuracy, ids."""

from collections.abc import Callable

import pytest
import torch
from linear_case import cut, draw
from torch import Tensor

from sparseformer.functional import (
    LossStats,
    entmax,
    entmax_loss,
    entmax_loss_with_stats,
    linear_entmax_loss,
    linear_entmax_loss_with_stats,
    linear_sparse_cross_entropy,
    linear_sparse_cross_entropy_with_stats,
    sparse_cross_entropy,
    sparse_cross_entropy_with_stats,
)
from sparseformer.testing import SeeInside

ROWS, WIDTH, CLASSES = 8, 6, 300
TARGET = torch.tensor([0, 299, 7, -100, 8, 20, 100, 5])

LOGITS_CASES = [
    pytest.param(sparse_cross_entropy_with_stats, sparse_cross_entropy, {"k": 4}, id="top-k"),
    pytest.param(sparse_cross_entropy_with_stats, sparse_cross_entropy, {"top_p": 0.7}, id="top-p"),
    pytest.param(entmax_loss_with_stats, entmax_loss, {"alpha": 1.0}, id="softmax"),
    pytest.param(entmax_loss_with_stats, entmax_loss, {"alpha": 1.5}, id="entmax"),
    pytest.param(
        entmax_loss_with_stats, entmax_loss, {"alpha": 1.7, "label_smoothing": 0.1}, id="smoothed"
    ),
]
LINEAR_CASES = [
    pytest.param(
        linear_sparse_cross_entropy_with_stats, linear_sparse_cross_entropy, {"k": 4}, id="top-k"
    ),
    pytest.param(
        linear_sparse_cross_entropy_with_stats, linear_sparse_cross_entropy, {"top_p": 0.7}, id="p"
    ),
    pytest.param(linear_entmax_loss_with_stats, linear_entmax_loss, {"alpha": 1.5}, id="entmax"),
    pytest.param(linear_entmax_loss_with_stats, linear_entmax_loss, {"alpha": 1.25}, id="wide"),
]


def batch() -> tuple[Tensor, Tensor]:
    """Return hidden states and a matrix; the logits of the first five rows favour their targets."""
    hidden, weight = 2 * draw(ROWS, WIDTH), draw(CLASSES, WIDTH, seed=1)
    for row in (0, 1, 2, 4):
        hidden[row] = 3 * weight[TARGET[row]]
    return hidden, weight


def expected_stats(logits: Tensor, arguments: dict) -> LossStats:
    """Count row by row."""
    sizes, kept, correct, ids = [], [], [], []
    for row, target in zip(logits.double(), TARGET.tolist(), strict=True):
        order = sorted(range(CLASSES), key=lambda j: (-float(row[j]), j))
        if "k" in arguments:
            support = sorted(order[: arguments["k"]])
        elif "top_p" in arguments:
            before = row.softmax(-1)[order].cumsum(-1) - row.softmax(-1)[order]
            support = [j for j, b in zip(order, before, strict=True) if b < arguments["top_p"]]
        else:
            support = entmax(row, arguments["alpha"]).nonzero()[:, 0].tolist()
        shown = support if "k" in arguments else [order[0]]
        ids.append([-1] * len(shown) if target == -100 else shown)
        if target != -100:
            sizes.append(len(support))
            kept.append(target in support)
            correct.append(order[0] == target)
    means = [torch.tensor(values).float().mean() for values in (kept, sizes, correct)]
    return LossStats(*means, torch.tensor(ids))


def check(stats: LossStats, loss: Tensor, expected_loss: Tensor, expected: LossStats) -> None:
    assert torch.equal(loss, expected_loss)
    torch.testing.assert_close(tuple(stats), tuple(expected))
    assert 0 < expected.accuracy < 1
    assert not any(value.requires_grad for value in stats)


@pytest.mark.parametrize(("function", "plain", "arguments"), LOGITS_CASES)
def test_statistics_of_logits_are_those_counted_by_hand(
    function: Callable, plain: Callable, arguments: dict
) -> None:
    hidden, weight = batch()
    logits = (hidden @ weight.T).requires_grad_()
    loss, stats = function(logits, TARGET, **arguments)
    expected = expected_stats(logits.detach(), arguments)
    check(stats, loss, plain(logits, TARGET, **arguments), expected)
    loss.backward()
    assert logits.grad is not None


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
@pytest.mark.parametrize(("function", "plain", "arguments"), LINEAR_CASES)
def test_statistics_of_hidden_states_are_those_counted_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable,
    plain: Callable,
    arguments: dict,
    tiled: bool,
) -> None:
    if tiled:
        cut(monkeypatch, classes=70, tokens=3)
    hidden, weight = batch()
    loss, stats = function(hidden, weight, TARGET, **arguments)
    expected = expected_stats(hidden @ weight.T, arguments)
    check(stats, loss, plain(hidden, weight, TARGET, **arguments), expected)


def test_ids_have_the_leading_shape_and_excluded_classes_none() -> None:
    logits = torch.tensor([[[0.0, 3.0, -torch.inf, 1.0]], [[-torch.inf] * 4]])
    _, stats = sparse_cross_entropy_with_stats(logits, torch.zeros(2, 1).long(), k=4)
    assert stats.top_ids.tolist() == [[[0, 1, -1, 3]], [[-1] * 4]]
    assert stats.support_size == 1.5
    assert stats.accuracy == 0
    assert stats.target_in_top_k == 0.5
    _, stats = entmax_loss_with_stats(logits, torch.tensor([[1], [0]]))
    assert stats.top_ids.tolist() == [[[1]], [[-1]]]
    assert (stats.accuracy, stats.support_size) == (0.5, 0.5)


def test_distributions_count_their_largest_class_as_the_target() -> None:
    logits = torch.tensor([[4.0, 2.0, 1.0, 0.0], [4.0, 2.0, 1.0, 0.0]])
    q = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.1, 0.2, 0.0, 0.7]])
    for loss, stats in (
        sparse_cross_entropy_with_stats(logits, q, k=2),
        entmax_loss_with_stats(logits, q, 1.5),
    ):
        assert loss.isfinite()
        assert stats.accuracy == stats.target_in_top_k == 0.5
    _, stats = sparse_cross_entropy_with_stats(logits, q, k=2)
    assert stats.top_ids.tolist() == [[0, 1], [0, 1]]


def test_no_row_that_counts_gives_zeros() -> None:
    target = torch.full((2,), -100)
    for _, stats in (
        sparse_cross_entropy_with_stats(torch.zeros(2, 5), target, k=3),
        linear_entmax_loss_with_stats(torch.zeros(2, 3), torch.zeros(5, 3), target),
    ):
        assert all(value == 0 for value in stats[:3])
        assert (stats.top_ids == -1).all()


class Reads(SeeInside):
    """Count how often a number is read back from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def see(self, func, args, kwargs):
        reads = ("_local_scalar_dense", "is_nonzero", "item")
        self.count += func.overloadpacket.__name__ in reads
        return func(*args, **kwargs)


def test_statistics_read_nothing_back() -> None:
    logits = draw(6, 40)
    target = torch.arange(6)
    counts = []
    for function in (sparse_cross_entropy, sparse_cross_entropy_with_stats):
        with Reads() as reads:
            function(logits, target, k=4)
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0
