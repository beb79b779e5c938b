"""Properties of entmax that hold for every row, on rows that hypothesis draws."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseformer.functional import entmax

PROFILE = settings(derandomize=True, deadline=None, max_examples=40)
ALPHAS = st.one_of(
    st.sampled_from([1.0, 1.5, 2.0]),
    st.floats(1.0, 2.0, allow_nan=False),
    st.floats(2.0, 6.0, allow_nan=False),
)


@st.composite
def rows(draw: st.DrawFn, least: int = 1) -> Tensor:
    """A row of 1 to 12 scores of any scale, often with ties."""
    scale = draw(st.sampled_from([0.01, 1.0, 30.0]))
    values = st.one_of(st.integers(-3, 3).map(float), st.floats(-3, 3, allow_nan=False))
    drawn = draw(st.lists(values, min_size=least, max_size=12))
    return torch.tensor(drawn, dtype=torch.float64) * scale


@PROFILE
@given(rows(), ALPHAS)
def test_p1_probabilities_lie_on_the_simplex(x: Tensor, alpha: float) -> None:
    p = entmax(x, alpha)
    assert p.isfinite().all()
    assert (p >= 0).all()
    assert abs(p.sum().item() - 1) < 1e-9


@PROFILE
@given(rows(), ALPHAS, st.integers(-1000, 1000))
def test_p2_a_shift_changes_nothing(x: Tensor, alpha: float, shift: int) -> None:
    tolerance = 1e-9 if alpha <= 2 else 1e-3
    torch.testing.assert_close(entmax(x + shift, alpha), entmax(x, alpha), atol=tolerance, rtol=0)


@PROFILE
@given(rows(), ALPHAS, st.randoms(use_true_random=False))
def test_p3_permuted_scores_give_permuted_probabilities(x: Tensor, alpha: float, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(x.numel()))
    random.shuffle(order)
    torch.testing.assert_close(entmax(x[order], alpha), entmax(x, alpha)[order], atol=1e-9, rtol=0)


@PROFILE
@given(rows(), ALPHAS)
def test_p4_a_larger_score_has_no_smaller_probability(x: Tensor, alpha: float) -> None:
    p = entmax(x, alpha)[x.argsort()]
    assert (p.diff() >= -1e-12).all()


@PROFILE
@given(rows(), ALPHAS, st.integers(0, 2**31))
def test_p5_gradients_sum_to_zero_on_the_support(x: Tensor, alpha: float, seed: int) -> None:
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).double()
    x.requires_grad_()
    p = entmax(x, alpha)
    (grad,) = torch.autograd.grad(p, x, upstream)
    assert grad.isfinite().all()
    assert abs(grad.sum().item()) <= 1e-9 * (1 + grad.abs().sum().item())
    assert grad[p == 0].eq(0).all()


@PROFILE
@given(rows(), ALPHAS, st.integers(0, 12))
def test_p6_an_excluded_entry_changes_nothing(x: Tensor, alpha: float, place: int) -> None:
    place = min(place, x.numel())
    excluded = torch.tensor([-torch.inf], dtype=torch.float64)
    p = entmax(torch.cat([x[:place], excluded, x[place:]]), alpha)
    assert p[place] == 0
    rest = torch.cat([p[:place], p[place + 1 :]])
    torch.testing.assert_close(rest, entmax(x, alpha), atol=1e-9, rtol=0)


@PROFILE
@given(rows(), ALPHAS, ALPHAS)
def test_p7_the_support_shrinks_with_alpha(x: Tensor, first: float, second: float) -> None:
    dense, sparse = (entmax(x, alpha) for alpha in sorted((first, second)))
    # Entries that only rounding holds in the support don't count.
    assert (sparse > 1e-9).sum() <= (dense > 0).sum()
