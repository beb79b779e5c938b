"""Entmax against its definition, the entmax package, published values and central differences."""

import math

import entmax as peer
import pytest
import torch
from entmax_case import ALPHAS, bisect, scores
from torch import Tensor

from sparseformer.functional import entmax, entmax15, sparsemax
from sparseformer.kernels.entmax.reference import (
    alpha_term,
    entmax_rows,
    probabilities,
    solve_rows,
    solve_threshold,
)
from sparseformer.testing import assert_close_to_reference

INF = math.inf
# x = [1, .5, 0, -1], w = [1, -2, 3, .5]: alpha, entmax(x), d(sum w p)/d alpha.
TABLE = [
    (1.05, [0.488150851, 0.288743266, 0.168391741, 0.054714142], -0.228335),
    (1.2, [0.533875362, 0.292511616, 0.147586712, 0.026026310], -0.289165),
    (1.333, [0.576329743, 0.294841977, 0.124250118, 0.004578162], -0.358319),
    (1.5, [0.624197529, 0.291666667, 0.084135804, 0.0], -0.475884),
    (1.9, [0.732266828, 0.267733172, 0.0, 0.0], 0.510779),
    (2.0, [0.75, 0.25, 0.0, 0.0], 0.553782),
]


@pytest.mark.parametrize(("alpha", "expected", "d_alpha"), TABLE, ids=lambda v: str(v)[:5])
def test_values_and_alpha_gradients_are_the_published_ones(
    alpha: float, expected: list[float], d_alpha: float
) -> None:
    x = torch.tensor([1, 0.5, 0, -1], dtype=torch.float64)
    w = torch.tensor([1, -2, 3, 0.5], dtype=torch.float64)
    learned = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    p = entmax(x, learned)
    (w * p).sum().backward()
    torch.testing.assert_close(
        p.detach(), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0
    )
    assert learned.grad is not None
    assert learned.grad.item() == pytest.approx(d_alpha, abs=1e-6)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        pytest.param(1.0, [0.0486, 0.3592, 0.5922], id="softmax"),
        pytest.param(1.5, [0.0, 0.3260, 0.6740], id="entmax15"),
        pytest.param(2.0, [0.0, 0.25, 0.75], id="sparsemax"),
    ],
)
def test_the_worked_example_of_the_sources_comes_out(alpha: float, expected: list[float]) -> None:
    p = entmax(torch.tensor([-2, 0, 0.5]), alpha)
    torch.testing.assert_close(p, torch.tensor(expected), atol=5e-5, rtol=0)


def test_the_alpha_gradient_of_the_sources_comes_out() -> None:
    alpha = torch.tensor(1.33, dtype=torch.float64, requires_grad=True)
    p = entmax(torch.tensor([-1, 0, 0.5], dtype=torch.float64), alpha)
    (grad,) = torch.autograd.grad(p[0], alpha)
    torch.testing.assert_close(
        p.detach(), torch.tensor([0.0460, 0.3276, 0.6264], dtype=torch.float64), atol=5e-5, rtol=0
    )
    assert grad.item() == pytest.approx(-0.2562, abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 33, 100, 127, 128, 129, 1000])
def test_rows_of_any_length_equal_bisection(n: int) -> None:
    x = scores(len(ALPHAS), n, seed=n)
    alpha = torch.tensor(ALPHAS, dtype=torch.float64)[:, None]
    torch.testing.assert_close(entmax(x, alpha), bisect(x, alpha), atol=1e-11, rtol=0)
    for row, value in enumerate(ALPHAS):
        torch.testing.assert_close(
            entmax(x[row], value), bisect(x[row], value), atol=1e-11, rtol=0, msg=f"alpha {value}"
        )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_of_any_magnitude_equal_bisection(scale: float, dtype: torch.dtype) -> None:
    x = scores(len(ALPHAS), 50, scale=scale, dtype=dtype)
    alpha = torch.tensor(ALPHAS, dtype=dtype)[:, None]
    p = entmax(x, alpha)
    assert_close_to_reference(p, bisect(x, alpha))
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[:, 0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 1.9, 2.0, 3.0], ids=str)
def test_rows_of_100000_are_normalised(alpha: float) -> None:
    x = torch.stack([scores(100_000, scale=1.0), torch.zeros(100_000)]).float()
    p = entmax(x, alpha)
    assert_close_to_reference(p, bisect(x, alpha))
    torch.testing.assert_close(
        p.double().sum(-1), torch.ones(2, dtype=torch.float64), atol=3e-6, rtol=0
    )


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(lambda x: (sparsemax(x), peer.sparsemax(x)), id="sparsemax"),
        pytest.param(lambda x: (entmax15(x), peer.entmax15(x)), id="entmax15"),
        pytest.param(lambda x: (entmax(x, 1.3), peer.entmax_bisect(x, 1.3, n_iter=90)), id="1.3"),
        pytest.param(lambda x: (entmax(x, 1.9), peer.entmax_bisect(x, 1.9, n_iter=90)), id="1.9"),
    ],
)
def test_values_and_gradients_equal_the_entmax_package(ours) -> None:  # type: ignore[no-untyped-def]
    x = scores(20, 40).requires_grad_()
    actual, expected = ours(x)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)
    upstream = scores(20, 40, seed=1)
    (d_actual,) = torch.autograd.grad(actual, x, upstream)
    (d_expected,) = torch.autograd.grad(expected, x, upstream)
    torch.testing.assert_close(d_actual, d_expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("alpha", ALPHAS, ids=str)
def test_gradients_of_scores_and_alpha_pass_gradcheck(alpha: float) -> None:
    """At alpha = 1 the difference quotient of alpha would leave the domain; it has its own test."""
    x = scores(3, 7, scale=1.0, seed=5).requires_grad_()
    shared = torch.tensor(alpha, dtype=torch.float64, requires_grad=alpha > 1)
    each = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=alpha > 1)
    assert torch.autograd.gradcheck(entmax, (x, shared))
    assert torch.autograd.gradcheck(entmax, (x, each))


@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-9, 1.00001], ids=str)
def test_alpha_gradient_at_softmax_is_the_limit(alpha: float) -> None:
    x, w = scores(9, scale=1.0), scores(9, seed=1)
    learned = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad((w * entmax(x, learned)).sum(), learned)
    step = 1e-4
    near, far = ((w * bisect(x, 1 + k * step)).sum() for k in (1, 2))
    start = (w * torch.softmax(x, -1)).sum()
    one_sided = (4 * near - far - 3 * start) / (2 * step)
    assert actual.item() == pytest.approx(one_sided.item(), abs=5e-5)


@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.333, 1.5, 1.9, 2.0, 3.0], ids=str)
def test_fp32_gradients_are_as_good_as_fp32(alpha: float) -> None:
    x, upstream = scores(64, 33, dtype=torch.float32), scores(64, 33, seed=1, dtype=torch.float32)

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        learned = torch.full((64, 1), alpha, dtype=torch.float32).to(dtype).requires_grad_()
        at = x.to(dtype).requires_grad_()
        return torch.autograd.grad(entmax(at, learned), (at, learned), upstream.to(dtype))

    p64 = entmax(x.double(), alpha)
    # The Jacobian of sparsemax jumps where a score is at the threshold.
    threshold = solve_threshold(x.double(), alpha)
    at_kink = (x - threshold + 1 / (alpha - 1)).abs().amin(-1, keepdim=True) < 1e-4
    for actual, expected in zip(run(torch.float32), run(torch.float64), strict=True):
        if alpha <= 2:
            assert_close_to_reference(
                actual, expected, kind="gradient", skip=at_kink if alpha == 2 else None
            )
        else:
            # Near the border of the support the gradient grows without bound.
            inner = (p64.masked_fill(p64 == 0, 1.0).amin(-1) > 1e-2)[:, None]
            torch.testing.assert_close(
                actual * inner, (expected * inner).float(), rtol=1e-3, atol=1e-4
            )


def test_sparsemax_jacobian_jumps_at_the_support() -> None:
    for second, expected in [(-1e-6, [0.0, 0.0]), (1e-6, [0.5, -0.5])]:
        x = torch.tensor([1.0, second], dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(sparsemax(x)[0], x)
        assert grad.tolist() == pytest.approx(expected)


def test_large_alpha_keeps_every_digit() -> None:
    """Thresholds in float32 were off by 0.138 at alpha = 10 on these rows (entmax issue 36).

    For two scores p solves p1**eps - p2**eps = eps * (x1 - x2), which gives x from p.
    """
    for alpha in (2.5, 4.0, 10.0, 50.0):
        eps = alpha - 1
        second = torch.cat(
            [torch.logspace(-12, -0.31, 500, dtype=torch.float64), torch.tensor([0.5])]
        )
        gap = ((1 - second) ** eps - second**eps) / eps
        p = entmax(torch.stack([gap, torch.zeros_like(gap)], -1), alpha)
        torch.testing.assert_close(p[:, 1], second, atol=1e-11, rtol=0)


def test_steep_gradients_stay_finite_and_balanced() -> None:
    """u = p ** (2 - alpha) passes the largest float where a key just enters the support."""
    second = torch.tensor([1e-30, 1e-12, 1e-6, 0.1], dtype=torch.float64)
    gap = ((1 - second) ** 3 - second**3) / 3
    x = torch.stack([gap, torch.zeros_like(gap)], -1).float().requires_grad_()
    alpha = torch.tensor(4.0, requires_grad=True)
    d_x, d_alpha = torch.autograd.grad(entmax(x, alpha)[:, 0].sum(), (x, alpha))
    assert d_x.isfinite().all()
    assert d_alpha.isfinite()
    torch.testing.assert_close(d_x[:, 0], -d_x[:, 1])


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 3.0], ids=str)
def test_minus_inf_entries_are_excluded_exactly(alpha: float) -> None:
    x = scores(4, 6)
    x[:, [1, 4]] = -INF
    x.requires_grad_()
    p = entmax(x, alpha)
    kept = [0, 2, 3, 5]
    torch.testing.assert_close(p[:, kept], entmax(x.detach()[:, kept], alpha), atol=1e-14, rtol=0)
    (grad,) = torch.autograd.grad(p, x, scores(4, 6, seed=1))
    assert p[:, [1, 4]].eq(0).all()
    assert grad[:, [1, 4]].eq(0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 3.0, "per row"], ids=str)
@pytest.mark.parametrize("length", [4, 200])
def test_a_fully_masked_row_gives_zeros_and_leaves_others_alone(
    alpha: float | str, length: int
) -> None:
    """Sorting raised an index error and bisection gave NaN here (entmax issue 19)."""
    x = scores(3, length)
    x[1] = -INF
    x.requires_grad_()
    learned = torch.tensor([1.0, 1.4, 1.8] if alpha == "per row" else [alpha] * 3)
    learned = learned.double()[:, None].requires_grad_()
    p = entmax(x, learned)
    d_x, d_alpha = torch.autograd.grad(p, (x, learned), scores(3, length, seed=1))
    assert p[1].eq(0).all()
    assert d_x[1].eq(0).all()
    assert d_alpha[1].eq(0).all()
    for row in (0, 2):
        alone = entmax(x.detach()[row], learned.detach()[row])
        torch.testing.assert_close(p.detach()[row], alone, atol=1e-14, rtol=0)
    assert d_x.isfinite().all()


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30, 0.0, 1e4], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0], ids=str)
def test_equal_scores_share_evenly(alpha: float, value: float) -> None:
    p = entmax(torch.full((2, 4), value), alpha)
    torch.testing.assert_close(p, torch.full((2, 4), 0.25))


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0], ids=str)
def test_a_clear_winner_takes_all(alpha: float) -> None:
    p = entmax(torch.tensor([0.0, 4.0, 0.0]), alpha)
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_alpha_gradient_is_reduced_to_the_shape_of_alpha() -> None:
    x = scores(2, 4, 3, 5).requires_grad_()
    upstream = scores(2, 4, 3, 5, seed=1)
    full = torch.full((2, 4, 3, 1), 1.5, dtype=torch.float64, requires_grad=True)
    (d_full,) = torch.autograd.grad(entmax(x, full), full, upstream)
    for shape in [(), (1,), (4, 1, 1), (2, 1, 1, 1), (3, 1)]:
        alpha = torch.full(shape, 1.5, dtype=torch.float64, requires_grad=True)
        (d_alpha,) = torch.autograd.grad(entmax(x, alpha), alpha, upstream)
        torch.testing.assert_close(d_alpha, d_full.sum_to_size(alpha.shape))


def test_only_asked_for_gradients_are_computed() -> None:
    x, alpha = scores(3, 5), torch.tensor(1.5, dtype=torch.float64)
    entmax(x, alpha.requires_grad_()).sum().backward()
    assert alpha.grad is not None
    entmax(x.requires_grad_(), alpha.detach())[0, 0].backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not entmax(x, alpha).requires_grad


def test_double_backward_is_refused_by_name() -> None:
    x = scores(5).requires_grad_()
    with pytest.raises(RuntimeError, match=r"entmax.* no second derivative"):
        torch.autograd.grad(entmax(x)[0], x, create_graph=True)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 1.8, 2.0, "per row"], ids=str)
@pytest.mark.parametrize("length", [5, 300])
def test_threshold_and_probabilities_agree_with_the_mapping(
    alpha: float | str, length: int
) -> None:
    x = scores(7, length, scale=1.0)
    x[2] = -INF
    x[3, 1:4] = -INF
    value = torch.linspace(1, 2, 7, dtype=torch.float64)[:, None] if alpha == "per row" else alpha
    t = solve_threshold(x, value)
    p, u = probabilities(x, t, value)
    torch.testing.assert_close(p, bisect(x, value), atol=1e-11, rtol=0)
    expected_u = torch.where(p > 0, p ** (2 - value), 0.0)
    torch.testing.assert_close(u, expected_u, atol=1e-7, rtol=1e-6)
    assert t[2].item() == 0.0
    solved = solve_rows(x, value)
    again, _ = probabilities(x - solved.maximum, solved.threshold, value)
    torch.testing.assert_close(solved.probs, p, atol=1e-11, rtol=0)
    torch.testing.assert_close(again, p, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.1, 1.5, 2.0], ids=str)
def test_alpha_term_is_p_times_g(alpha: float, dtype: torch.dtype) -> None:
    """For every size of x = eps log p: where the series ends, the quotient takes over."""
    p = torch.cat([torch.logspace(-30, 0, 400, dtype=torch.float64), torch.zeros(3)]).to(dtype)
    u = torch.where(p > 0, p.double() ** (2 - alpha), 0.0).to(dtype)
    p64, eps = p.double().clamp(min=1e-300), alpha - 1
    y = -eps * p64.log()
    series = sum(y**k / float(math.factorial(k + 2)) for k in range(25))
    phi = torch.where(y < 1, series, (y.exp() - 1 - y) / (y * y).clamp(min=1e-30))
    expected = torch.where(p > 0, -p.double() * p64.log() ** 2 * phi, 0.0)
    # u is rounded, and enters divided by eps ** 2.
    rounding = torch.finfo(dtype).eps
    for value in (alpha, torch.full_like(p, alpha)):
        actual = alpha_term(p, u, value).double()
        torch.testing.assert_close(actual, expected, rtol=100 * rounding, atol=rounding)


def test_rows_do_not_depend_on_their_batch() -> None:
    x = scores(40, 20, dtype=torch.float32)
    whole = entmax(x, 1.3)
    for rows in (slice(0, 1), slice(3, 17), slice(17, 40)):
        torch.testing.assert_close(entmax(x[rows], 1.3), whole[rows], atol=3e-7, rtol=0)


def test_an_integer_alpha_is_that_float() -> None:
    x = scores(3, 4).requires_grad_()
    p = entmax(x, 2)
    assert p.equal(sparsemax(x))
    p[0, 0].backward()


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0], ids=str)
def test_a_nan_stays_in_its_row_where_scores_are_not_checked(alpha: float) -> None:
    """A NaN that became a row of zeros would hide a broken model."""
    x = scores(3, 6)
    x[1, 2] = math.nan
    p = entmax_rows(x, alpha)
    assert p[1].isnan().all()
    torch.testing.assert_close(p[[0, 2]], entmax(x[[0, 2]], alpha), atol=1e-14, rtol=0)
