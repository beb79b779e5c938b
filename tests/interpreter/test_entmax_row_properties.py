"""Properties P1 to P6 of KERNELS.md, held by entmax's row kernels on generated rows."""

import pytest
import torch
from entmax_rows_case import INF, gradients, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

EXAMPLES = settings(max_examples=20, deadline=None, derandomize=True)
# Multiples of 1/8 keep sums and differences exact, so that equal scores stay equal.
SCORES = st.lists(st.integers(-64, 64).map(lambda k: k / 8), min_size=1, max_size=70)
ALPHA = st.sampled_from([1.0, 1.05, 1.3, 1.5, 1.9, 2.0])
LONG = st.booleans()


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


@EXAMPLES
@given(SCORES, ALPHA, LONG)
def test_p1_rows_are_distributions(values: list[float], alpha: float, long: bool) -> None:
    p = solve(row(values), alpha, long)
    assert bool((p >= 0).all())
    assert p.double().sum().item() == pytest.approx(1.0, abs=1e-6)


@EXAMPLES
@given(SCORES, ALPHA, LONG, st.integers(-100, 100))
def test_p2_a_common_shift_changes_nothing(
    values: list[float], alpha: float, long: bool, shift: int
) -> None:
    assert torch.equal(solve(row(values) + shift, alpha, long), solve(row(values), alpha, long))


@EXAMPLES
@given(SCORES, ALPHA, LONG, st.randoms(use_true_random=False))
def test_p3_p4_order_of_columns_is_free_and_order_of_scores_is_kept(
    values: list[float], alpha: float, long: bool, random
) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(values)))
    random.shuffle(order)
    p = solve(row(values), alpha, long)
    torch.testing.assert_close(
        solve(row(values)[:, order], alpha, long), p[:, order], rtol=2e-6, atol=1e-7
    )
    ranked = p[0, row(values)[0].argsort()]
    assert bool((ranked.diff() >= 0).all())


@EXAMPLES
@given(SCORES, ALPHA, LONG)
def test_p5_gradients_sum_to_0_and_vanish_off_the_support(
    values: list[float], alpha: float, long: bool
) -> None:
    p = solve(row(values), alpha, long)
    grad = torch.sin(torch.arange(float(len(values))))[None]
    d_scores, _ = gradients(p, grad, alpha, long)
    assert d_scores.double().sum().item() == pytest.approx(0.0, abs=1e-6 * len(values) ** 0.5)
    assert not d_scores[p == 0].any()


@EXAMPLES
@given(SCORES, ALPHA, LONG, st.integers(0, 70))
def test_p6_an_excluded_key_changes_nothing(
    values: list[float], alpha: float, long: bool, place: int
) -> None:
    place = min(place, len(values))
    p = solve(row([*values[:place], -INF, *values[place:]]), alpha, long)
    assert p[0, place] == 0
    rest = torch.cat([p[:, :place], p[:, place + 1 :]], 1)
    torch.testing.assert_close(rest, solve(row(values), alpha, long), rtol=2e-6, atol=2e-7)
