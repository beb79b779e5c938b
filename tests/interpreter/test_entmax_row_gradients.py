"""Entmax's backward row kernels against the float64 reference and central differences.

Matrix rows M2 (d scores, d alpha), M8 (dtypes), M9 (strides) and M10 (poison, guard bands).
"""

from typing import Any

import pytest
import torch
from entmax_rows_case import ALPHAS, BLOCK, INF, each_alpha, exact, gradients, scores, solve
from torch import Tensor

from sparseformer.kernels.entmax import gradient, reference
from sparseformer.kernels.entmax.backward import entmax_backward, launch_gradients
from sparseformer.kernels.entmax.forward import MAX_TILE, entmax_forward
from sparseformer.kernels.entmax.row_input import split_alpha
from sparseformer.kernels.entmax.rows import entmax_gradients
from sparseformer.testing import assert_close_to_reference, poison_empty

REGIMES = pytest.mark.parametrize("long", [False, True], ids=["tile", "long"])
# x = [1, .5, 0, -1], w = [1, -2, 3, .5]: alpha, entmax(x), d(sum w p)/d alpha.
TABLE = [
    (1.05, [0.488150851, 0.288743266, 0.168391741, 0.054714142], -0.228335),
    (1.2, [0.533875362, 0.292511616, 0.147586712, 0.026026310], -0.289165),
    (1.333, [0.576329743, 0.294841977, 0.124250118, 0.004578162], -0.358319),
    (1.5, [0.624197529, 0.291666667, 0.084135804, 0.0], -0.475884),
    (1.9, [0.732266828, 0.267733172, 0.0, 0.0], 0.510779),
    (2.0, [0.75, 0.25, 0.0, 0.0], 0.553782),
]


def check(x: Tensor, grad: Tensor, alpha: float | Tensor, long: bool = False) -> None:
    """Hold d scores and d alpha to those of float64 from the same inputs."""
    actual = gradients(solve(x, alpha, long), grad, alpha, long)
    column = alpha.expand(len(x))[:, None] if isinstance(alpha, Tensor) else alpha
    exact_column = column.double() if isinstance(column, Tensor) else column
    expected = gradient.gradients(exact(x, alpha), grad.double(), exact_column, True, True)
    # The Jacobian of sparsemax jumps where a score is at the threshold.
    t = reference.solve_threshold(x.double(), exact_column)
    at_kink = (x - t + 1 / (torch.as_tensor(exact_column) - 1)).abs().amin(-1, keepdim=True) < 1e-4
    at_kink &= torch.as_tensor(exact_column) == 2.0
    for result, exact64 in zip(actual, expected, strict=True):
        assert exact64 is not None
        assert_close_to_reference(
            result.view(exact64.shape), exact64, kind="gradient", skip=at_kink
        )


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 33, 100, 129, 1000])
def test_gradients_of_any_length_and_alpha_equal_float64(n: int) -> None:
    x, grad = scores(len(ALPHAS), n, seed=n), scores(len(ALPHAS), n, seed=n + 1)
    check(x, grad, each_alpha())
    for alpha in ALPHAS:
        check(x[:3], grad[:3], alpha)


@pytest.mark.parametrize("n", [33, 129])
def test_gradients_of_long_rows_equal_float64(n: int) -> None:
    x, grad = scores(len(ALPHAS), n, seed=n), scores(len(ALPHAS), n, seed=n + 1)
    check(x, grad, each_alpha(), long=True)
    for alpha in ALPHAS:
        check(x[:3], grad[:3], alpha, long=True)


@REGIMES
def test_gradients_of_half_precision_and_an_fp32_alpha_equal_float64(long: bool) -> None:
    x = scores(len(ALPHAS), 40, dtype=torch.float16)
    grad = scores(len(ALPHAS), 40, seed=1, dtype=torch.float16)
    # p of half precision, from which u is computed, is itself rounded.
    p = solve(x, each_alpha(), long)
    column = each_alpha(torch.float64)[:, None]
    expected = gradient.gradients(p.double(), grad.double(), column, True, True)
    d_scores, d_alpha = gradients(p, grad, each_alpha(), long)
    assert d_scores.dtype == torch.float16
    assert d_alpha.dtype == torch.float32
    for actual, exact64 in zip((d_scores, d_alpha[:, None]), expected, strict=True):
        assert exact64 is not None
        assert_close_to_reference(actual, exact64, kind="gradient")


class _Rows(torch.autograd.Function):
    """The row kernels as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, value: float | None, long: bool) -> Tensor:
        given = alpha.detach() if value is None else value
        p = solve(x, given, long)
        ctx.save_for_backward(p, alpha)
        ctx.given, ctx.long = given, long
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        p, alpha = ctx.saved_tensors
        d_scores, d_alpha = gradients(p, grad, ctx.given, ctx.long)
        return d_scores, d_alpha.sum_to_size(alpha.shape), None, None


@REGIMES
@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 1.9, 2.0], ids=str)
def test_scores_and_alpha_pass_gradcheck(alpha: float, long: bool) -> None:
    n = 34 if long else 7
    x = scores(2 if long else 3, n, scale=1.0, seed=5, dtype=torch.float64).requires_grad_()
    shared = torch.tensor([alpha], dtype=torch.float64, requires_grad=True)
    each = torch.full((len(x),), alpha, dtype=torch.float64, requires_grad=True)
    fast = long
    assert torch.autograd.gradcheck(
        lambda *a: _Rows.apply(*a, None, long), (x, each), fast_mode=fast
    )
    if not long:
        assert torch.autograd.gradcheck(lambda *a: _Rows.apply(*a, None, long), (x, shared))
        fixed = shared.detach()
        assert torch.autograd.gradcheck(lambda a: _Rows.apply(a, fixed, alpha, long), (x,))


def test_softmax_passes_gradcheck() -> None:
    x = scores(3, 7, scale=1.0, dtype=torch.float64).requires_grad_()
    alpha = torch.ones(1, dtype=torch.float64)
    for value in (1.0, None):
        assert torch.autograd.gradcheck(lambda a, v=value: _Rows.apply(a, alpha, v, False), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("alpha", "expected", "d_alpha"), TABLE, ids=lambda v: str(v)[:5])
def test_values_and_alpha_gradients_are_the_published_ones(
    alpha: float, expected: list[float], d_alpha: float, dtype: torch.dtype
) -> None:
    x = torch.tensor([[1, 0.5, 0, -1]], dtype=dtype)
    w = torch.tensor([[1, -2, 3, 0.5]], dtype=dtype)
    for given in (alpha, torch.tensor([alpha], dtype=dtype)):
        p = entmax_forward(x, given)
        assert p[0].tolist() == pytest.approx(expected, abs=2e-7)
        assert gradients(p, w, given)[1].item() == pytest.approx(d_alpha, abs=5e-6)


@REGIMES
@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-6, 1.0001, 1.001, 1.01], ids=str)
def test_d_alpha_is_right_at_softmax_and_next_to_it(alpha: float, long: bool) -> None:
    x, grad = scores(2, 50), scores(2, 50, seed=1)
    check(x, grad, alpha, long)
    check(x, grad, torch.tensor([alpha]), long)


@REGIMES
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0], ids=str)
def test_rows_without_a_support_and_excluded_keys_get_no_gradient(alpha: float, long: bool) -> None:
    x = scores(2, 40, scale=0.3)
    x[0] = -INF
    x[1, ::2] = -INF
    d_scores, d_alpha = gradients(solve(x, alpha, long), scores(2, 40, seed=1), alpha, long)
    assert not d_scores[0].any()
    assert d_alpha[0] == 0
    assert not d_scores[1, ::2].any()
    assert bool(d_scores[1].any())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@REGIMES
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0], ids=str)
def test_a_nan_row_gives_nan_gradients_to_itself_only(alpha: float, long: bool) -> None:
    x = scores(2, 40)
    x[0, 3] = float("nan")
    d_scores, d_alpha = gradients(solve(x, alpha, long), scores(2, 40, seed=1), alpha, long)
    assert bool(d_scores[0].isnan().all())
    assert bool(d_alpha[0].isnan())
    assert bool(d_scores[1].isfinite().all())
    assert bool(d_alpha[1].isfinite())


@REGIMES
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda: torch.tensor(0.7).expand(3, 40), id="expanded"),
        pytest.param(lambda: scores(3, 1, seed=1).expand(3, 40), id="expanded columns"),
        pytest.param(lambda: scores(40, 3, seed=1).t(), id="transposed"),
        pytest.param(lambda: scores(6, 90, seed=1)[1::2, 10::2], id="sliced"),
    ],
)
def test_any_strides_of_the_upstream_gradient(view, long: bool) -> None:  # type: ignore[no-untyped-def]
    grad = view()
    for alpha in (1.5, torch.tensor([[1.2, 1.0], [1.7, 9.0], [2.0, 9.0]])[:, 0]):
        p = solve(scores(3, 40), alpha, long)
        d_scores, d_alpha = gradients(p, grad, alpha, long)
        expected = gradients(p, grad.contiguous(), alpha, long)
        assert torch.equal(d_scores, expected[0])
        assert torch.equal(d_alpha, expected[1])


@REGIMES
@pytest.mark.parametrize("alpha", [4.0, torch.tensor([4.0])], ids=["float", "tensor"])
def test_steep_gradients_stay_finite_and_balanced(alpha: float | Tensor, long: bool) -> None:
    """u = p ** (2 - alpha) passes the largest float where a key just enters the support."""
    second = torch.tensor([1e-30, 1e-12, 1e-6, 0.1])
    p = torch.zeros(4, 40)
    p[:, 3], p[:, 37] = 1 - second, second
    grad = torch.zeros(4, 40)
    grad[:, 3] = 1.0
    d_scores, d_alpha = gradients(p, grad, alpha, long)
    expected = gradient.gradients(p.double(), grad.double(), 4.0, True, True)
    assert expected[1] is not None
    torch.testing.assert_close(d_scores[:, 3], -d_scores[:, 37], rtol=1e-6, atol=0)
    assert not torch.cat([d_scores[:, :3], d_scores[:, 4:37]], 1).any()
    torch.testing.assert_close(d_scores[:, 3].double(), expected[0][:, 3], rtol=1e-5, atol=0)  # type: ignore[index]
    torch.testing.assert_close(d_alpha.double(), expected[1][:, 0], rtol=1e-4, atol=1e-7)


@REGIMES
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)], ids=str)
def test_only_what_is_wanted_is_computed(wanted: tuple[bool, bool], long: bool) -> None:
    n = MAX_TILE + 1 if long else 40
    p, grad = entmax_forward(scores(2, n), 1.3), scores(2, n, seed=1)
    both = entmax_backward(p, grad, 1.3, True, True)
    for result, want, full in zip(
        entmax_backward(p, grad, 1.3, *wanted), wanted, both, strict=True
    ):
        assert (result is not None) == want
        assert result is None or torch.equal(result, full)  # type: ignore[arg-type]


@REGIMES
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.3, 3.0], ids=str)
def test_writes_every_entry_and_nothing_else(alpha: float, long: bool) -> None:
    x, grad = scores(3, 41), scores(3, 41, seed=1)
    p = solve(x, alpha, long)
    expected = gradients(p, grad, alpha, long)
    with poison_empty():
        again = gradients(p, grad, alpha, long)
    buffer = torch.full((3 * 41 + 16,), 1234.5)
    alphas = torch.full((3 + 16,), 1234.5)
    d_scores, d_alpha = buffer[8:-8].view(3, 41), alphas[8:-8]
    block = BLOCK if long else MAX_TILE
    launch_gradients(p, grad, split_alpha(alpha, x), d_scores, d_alpha, block)
    for pair in (again, (d_scores, d_alpha)):
        assert torch.equal(pair[0], expected[0])
        assert torch.equal(pair[1], expected[1])
    for guarded in (buffer, alphas):
        assert bool((guarded[:8] == 1234.5).all())
        assert bool((guarded[-8:] == 1234.5).all())


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_empty_input_gives_empty_gradients(shape: tuple[int, int]) -> None:
    p = torch.zeros(shape)
    d_scores, d_alpha = gradients(p, p, 1.5)
    assert d_scores.shape == shape
    assert d_alpha.tolist() == [0.0] * shape[0]


def test_the_door_reshapes_batches_and_alphas() -> None:
    x, grad = scores(2, 3, 9, dtype=torch.float64), scores(2, 3, 9, seed=1, dtype=torch.float64)
    alpha = torch.tensor([1.2, 1.5, 2.0], dtype=torch.float64)[:, None]
    p = reference.entmax_rows(x, alpha)
    expected = entmax_gradients(p, grad, alpha, True, True)
    actual = entmax_gradients(p, grad, alpha, True, True, "triton")
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
