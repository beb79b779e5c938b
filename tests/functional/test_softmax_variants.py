"""Softmax on the top k, on the nucleus, and by Taylor polynomial, against their definitions."""

import math

import pytest
import torch
from torch import Tensor

from sparseformer.functional import taylor_softmax, topk_softmax, topp_softmax
from sparseformer.kernels.softmax_variants.reference import topk_probabilities, topp_probabilities

INF = math.inf


def scores(*shape: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def chosen(row: list[float], size: int) -> list[int]:
    """Indices of the largest entries, ties by lowest index."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:size]


def on(row: Tensor, kept: list[int]) -> Tensor:
    p = torch.zeros_like(row)
    p[kept] = torch.softmax(row[kept], -1)
    return p


@pytest.mark.parametrize("k", [1, 2, 7, 30, 39])
def test_topk_is_softmax_on_the_k_largest(k: int) -> None:
    x = scores(6, 40)
    expected = torch.stack([on(row, chosen(row.tolist(), k)) for row in x])
    torch.testing.assert_close(topk_softmax(x, k), expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_topk_breaks_ties_by_lowest_index(k: int) -> None:
    x = torch.tensor([[1, 3, 1, 1, 3, 0], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]]).double()
    expected = torch.stack([on(row, chosen(row.tolist(), k)) for row in x])
    torch.testing.assert_close(topk_softmax(x, k), expected)


@pytest.mark.parametrize("k", [4, 5, 6, 100])
def test_topk_with_more_places_than_finite_scores_is_softmax(k: int) -> None:
    """A k above the number of valid keys raised or kept masked keys (x-transformers issue 165)."""
    x = scores(3, 6)
    x[:, [0, 3]] = -INF
    torch.testing.assert_close(topk_softmax(x, k), torch.softmax(x, -1))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_topp_is_softmax_on_the_smallest_set_of_that_mass(p: float) -> None:
    x = scores(20, 15)
    for row, actual in zip(x, topp_softmax(x, p), strict=True):
        order = chosen(row.tolist(), row.numel())
        mass = torch.softmax(row, -1)[order].cumsum(0)
        size = int((mass < p).sum()) + 1
        torch.testing.assert_close(actual, on(row, order[:size]), atol=1e-15, rtol=0)


def test_topp_breaks_ties_by_lowest_index() -> None:
    p = topp_softmax(torch.zeros(1, 10), 0.35)
    assert p.count_nonzero() == 4
    torch.testing.assert_close(p[0, :4], torch.full((4,), 0.25))


def test_topp_stops_where_the_mass_is_exactly_p() -> None:
    assert topp_softmax(torch.zeros(4), 0.5).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_topp_of_one_is_softmax() -> None:
    x = scores(5, 9, scale=30.0)
    torch.testing.assert_close(topp_softmax(x, 1.0), torch.softmax(x, -1))


@pytest.mark.parametrize("order", [2, 4, 6])
def test_taylor_is_its_polynomial(order: int) -> None:
    x = scores(4, 7)
    polynomial = sum(x**i / math.factorial(i) for i in range(order + 1))
    expected = polynomial / polynomial.sum(-1, keepdim=True)
    torch.testing.assert_close(taylor_softmax(x, order), expected)


def test_taylor_of_high_order_is_softmax() -> None:
    x = scores(4, 7, scale=0.5)
    torch.testing.assert_close(taylor_softmax(x, 20), torch.softmax(x, -1), atol=1e-12, rtol=0)


def test_taylor_stays_finite_where_its_powers_do_not() -> None:
    p = taylor_softmax(torch.tensor([[1e4, 5e3, -1e4, 0.0]]), 12)
    assert p.isfinite().all()
    torch.testing.assert_close(p[0, :2], torch.tensor([0.5, 0.5**13]), rtol=1e-2, atol=0)


MAPPINGS = [
    pytest.param(lambda x, **k: topk_softmax(x, 3, **k), id="topk"),
    pytest.param(lambda x, **k: topp_softmax(x, 0.8, **k), id="topp"),
    pytest.param(lambda x, **k: taylor_softmax(x, 4, **k), id="taylor"),
]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_gradients_pass_gradcheck(mapping) -> None:  # type: ignore[no-untyped-def]
    assert torch.autograd.gradcheck(mapping, (scores(3, 8).requires_grad_(),))


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_excluded_entries_and_rows_are_exact_zeros(mapping) -> None:  # type: ignore[no-untyped-def]
    x = scores(3, 6)
    x[0, [1, 5]] = -INF
    x[1] = -INF
    x.requires_grad_()
    p = mapping(x)
    (grad,) = torch.autograd.grad(p, x, scores(3, 6, seed=1))
    kept = [0, 2, 3, 4]
    torch.testing.assert_close(p[0, kept], mapping(x.detach()[0, kept]), atol=1e-15, rtol=0)
    torch.testing.assert_close(p[2], mapping(x.detach()[2]), atol=1e-15, rtol=0)
    assert p[0, [1, 5]].eq(0).all()
    assert p[1].eq(0).all()
    assert grad[0, [1, 5]].eq(0).all()
    assert grad[1].eq(0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_dim_dtype_and_temperature_are_kept(mapping) -> None:  # type: ignore[no-untyped-def]
    x = scores(5, 8)
    torch.testing.assert_close(mapping(x.T, dim=0), mapping(x).T)
    torch.testing.assert_close(mapping(x, temperature=2.0), mapping(x / 2))
    half = mapping(x.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(
        half.double(), mapping(x.to(torch.bfloat16).double()), atol=4e-3, rtol=0
    )


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_empty_tensors_keep_their_shape(mapping, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(shape, requires_grad=True)
    mapping(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_nan_is_refused(mapping) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="_softmax got nan in its scores"):
        mapping(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda x: topk_softmax(x, 0), "k of 1 or more, got 0", id="k"),
        pytest.param(lambda x: topp_softmax(x, 0.0), r"p in \(0, 1\], got 0.0", id="p zero"),
        pytest.param(lambda x: topp_softmax(x, math.nan), "got nan", id="p nan"),
        pytest.param(lambda x: topp_softmax(x, 1.5), "got 1.5", id="p above"),
        pytest.param(lambda x: taylor_softmax(x, 3), "even order of 2 or more, got 3", id="odd"),
        pytest.param(lambda x: taylor_softmax(x, 0), "got 0", id="order"),
    ],
)
def test_bad_settings_are_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4))


@pytest.mark.parametrize("mapping", MAPPINGS[:2])
def test_double_backward_is_refused_by_name(mapping) -> None:  # type: ignore[no-untyped-def]
    x = scores(6).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(mapping(x)[0], x, create_graph=True)


def test_references_leave_their_input_alone() -> None:
    x = scores(4, 9)
    before = x.clone()
    topk_probabilities(x, 3)
    topp_probabilities(x, 0.5)
    assert x.equal(before)
