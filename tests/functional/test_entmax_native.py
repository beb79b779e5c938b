"""The C++ entmax against the float64 reference: values, thresholds, gradients, layouts, threads."""

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from entmax_case import scores
from torch import Tensor

from sparseformer.functional import entmax
from sparseformer.kernels.entmax import gradient, native, reference
from sparseformer.testing import assert_close_to_reference, poison_empty

INF = math.inf
ALPHAS = (1.0, 1.05, 1.2, 1.333, 1.5, 1.9, 2.0, 2.5)
LENGTHS = (1, 2, 3, 7, 16, 17, 33, 100, 129, 1000, 4096, 40_000)
SCALES = (1e-3, 1.0, 30.0, 1e4)


def _count(n: int) -> int:
    return 8 if n > 1000 else 24


def _rows(n: int, scale: float, seed: int = 0) -> Tensor:
    """Random rows, then ties, all equal, one clear winner, masked in part, and fully masked."""
    x = scores(_count(n), n, scale=scale, seed=n + seed, dtype=torch.float32)
    x[-6] = (x[-6] / scale).round() * scale
    x[-5] = -scale
    x[-4, n // 2] += 3 + 3 * scale
    x[-3, : n // 2] = -INF
    x[-2, n // 3 :: 2] = -INF
    x[-1] = -INF
    return x


def _per_row(rows: int) -> Tensor:
    """Every kind of alpha in one batch, one for each row."""
    return torch.tensor(ALPHAS * 3)[:rows, None]


def _each_alpha(rows: int) -> Iterator[float | Tensor]:
    yield from ALPHAS[:-1] if rows < 10 else ALPHAS
    yield _per_row(rows)


def _as_double(alpha: float | Tensor) -> float | Tensor:
    return alpha.double() if isinstance(alpha, Tensor) else alpha


@cache
def _expected(n: int, scale: float) -> list[reference.SolvedRows]:
    """The float64 reference at each alpha."""
    x = _rows(n, scale).double()
    return [reference.solve_rows(x, _as_double(alpha)) for alpha in _each_alpha(len(x))]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_probabilities_are_as_close_to_float64_as_the_references(n: int, scale: float) -> None:
    x = _rows(n, scale)
    alphas = list(_each_alpha(len(x)))
    actual = [native.solve_rows(x, alpha) for alpha in alphas]
    plain = [reference.solve_rows(x, alpha) for alpha in alphas]
    expected = _expected(n, scale)
    probs, expected_probs = (torch.stack([s.probs for s in rows]) for rows in (actual, expected))
    assert_close_to_reference(probs, expected_probs, torch.stack([s.probs for s in plain]))
    sums = probs.double().sum(-1)
    torch.testing.assert_close(sums, expected_probs.sum(-1), atol=1e-6, rtol=0)
    assert probs.min() >= 0
    assert probs[:, x == -INF].eq(0).all()
    for ours, right in zip(actual, expected, strict=True):
        assert ours.maximum.equal(right.maximum.float())


@pytest.mark.parametrize("n", LENGTHS)
def test_probabilities_come_out_again_from_maximum_and_threshold(n: int) -> None:
    for scale in SCALES:
        x = _rows(n, scale)
        for alpha in (1.0, 1.05, 1.333, 1.5, 1.9, 2.0):
            solved = native.solve_rows(x, alpha)
            again, _ = reference.probabilities(
                x.double() - solved.maximum, solved.threshold.double(), alpha
            )
            # Up to here the rounding of t moves p; a row without a finite score has no t.
            bound = 2 * float(solved.threshold.abs().max() + 1) * 6e-8
            torch.testing.assert_close(again[:-1], solved.probs[:-1].double(), atol=bound, rtol=0)


@pytest.mark.parametrize("alpha", [1.05, 1.333, 1.5, 1.9, 2.0], ids=str)
def test_the_support_is_that_of_float64(alpha: float) -> None:
    x = _rows(1000, 1.0)[:-1]
    solved = reference.solve_rows(x.double(), alpha)
    w = 1 + (alpha - 1) * (x.double() - solved.maximum - solved.threshold)
    probs = native.solve_rows(x, alpha).probs
    assert probs[w < -1e-6].eq(0).all()
    assert probs[(w > 1e-3) & (solved.probs > 1e-30)].gt(0).all()


@pytest.mark.parametrize("alpha", [1.0, 1.0001, 1.05, 1.5, 1.9, 2.0], ids=str)
def test_rows_of_100000_are_normalised(alpha: float) -> None:
    x = torch.stack([torch.zeros(100_000), scores(100_000, scale=1e-3), scores(100_000, scale=1.0)])
    x[1, 1000:1100] = -INF
    probs = native.solve_rows(x.float(), alpha).probs.double()
    torch.testing.assert_close(probs.sum(-1), torch.ones(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(probs[0], torch.full_like(probs[0], 1e-5), atol=0, rtol=1e-6)


def _stacked(pairs: list[tuple[Tensor | None, Tensor | None]]) -> tuple[Tensor, Tensor]:
    d_scores, d_alpha = (
        [x for x in column if x is not None] for column in zip(*pairs, strict=True)
    )
    return torch.stack(d_scores), torch.stack(d_alpha)


@pytest.mark.parametrize("n", LENGTHS[1:])
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_gradients_are_as_close_to_float64_as_the_references(n: int, scale: float) -> None:
    alphas = list(_each_alpha(_count(n)))
    upstream = scores(_count(n), n, scale=1.0, seed=n + 1, dtype=torch.float32)
    cases = [(solved.probs.float(), upstream) for solved in _expected(n, scale)]
    actual, plain, expected = (
        _stacked(
            [function(*case, alpha, True, True) for case, alpha in zip(wide, values, strict=True)]
        )
        for function, wide, values in [
            (native.gradients, cases, alphas),
            (gradient.gradients, cases, alphas),
            (
                gradient.gradients,
                [(p.double(), g.double()) for p, g in cases],
                [_as_double(alpha) for alpha in alphas],
            ),
        ]
    )
    assert_close_to_reference(actual[0], expected[0], plain[0], kind="gradient")
    assert actual[0][torch.stack([p for p, _ in cases]) == 0].eq(0).all()
    # Rows of equal p have no gradient of alpha, which leaves no scale for a relative bound.
    error, baseline = (result[1].double() - expected[1] for result in (actual, plain))
    assert error.abs().max() <= 2 * baseline.abs().max() + 2e-7
    assert error.square().mean() <= 2 * baseline.square().mean() + 1e-14


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_single_score_has_no_gradient(alpha: float) -> None:
    x = torch.tensor([[3.0], [-INF]])
    solved = native.solve_rows(x, alpha)
    assert solved.probs.tolist() == [[1.0], [0.0]]
    for result in native.gradients(solved.probs, torch.full((2, 1), 7.0), alpha, True, True):
        assert result is not None
        assert result.eq(0).all()


@pytest.mark.parametrize("alpha", [1.0001, 1.05, 1.2, 1.5, 1.9, 2.0], ids=str)
def test_alpha_gradients_hold_for_every_size_of_p(alpha: float) -> None:
    """Rows of one tiny p each, on both sides of where the series of g hands over."""
    small = torch.logspace(-30, -0.31, 200, dtype=torch.float64).float()
    probs = torch.stack([small, 1 - small], -1)
    upstream = torch.tensor([1.0, 0.0]).expand(200, 2)
    (_, expected) = gradient.gradients(probs.double(), upstream.double(), alpha, False, True)
    (_, actual) = native.gradients(probs, upstream, alpha, False, True)
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=1e-7)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat_interleave(2, 1)[:, ::2], id="every second"),
        pytest.param(lambda x: torch.cat([x[:1], x])[1:], id="offset"),
        pytest.param(lambda x: x.repeat(1, 2)[:, : x.size(1)], id="wide rows"),
    ],
)
def test_strides_change_nothing(view) -> None:  # type: ignore[no-untyped-def]
    x, upstream = _rows(37, 2.0), scores(24, 37, dtype=torch.float32)
    solved = native.solve_rows(x, 1.3)
    assert all(a.equal(b) for a, b in zip(native.solve_rows(view(x), 1.3), solved, strict=True))
    plain = native.gradients(solved.probs, upstream, 1.3, True, True)
    viewed = native.gradients(view(solved.probs), view(upstream), 1.3, True, True)
    assert all(a.equal(b) for a, b in zip(viewed, plain, strict=True))  # type: ignore[union-attr]


def test_an_expanded_upstream_gradient_is_read_right() -> None:
    probs = native.solve_rows(_rows(37, 1.0), 1.3).probs
    one = torch.arange(37.0)
    for upstream in (torch.tensor(2.0).expand(24, 37), one.expand(24, 37)):
        d_scores, _ = native.gradients(probs, upstream, 1.3, True, False)
        expected, _ = gradient.gradients(probs.double(), upstream.double(), 1.3, True, False)
        assert d_scores is not None
        assert expected is not None
        torch.testing.assert_close(d_scores.double(), expected, atol=2e-5, rtol=0)


def test_any_shape_of_rows_and_alpha_is_served() -> None:
    x = scores(2, 3, 4, 9, dtype=torch.float32)
    for shape in [(), (1,), (4, 1), (3, 1, 1), (2, 1, 4, 1), (2, 3, 4, 1)]:
        alpha = torch.linspace(1, 2.5, math.prod(shape)).reshape(shape)
        solved = native.solve_rows(x, alpha)
        expected = reference.solve_rows(x.double(), alpha.double())
        for ours, right in zip(solved, expected, strict=True):
            torch.testing.assert_close(ours.double(), right, atol=1e-6, rtol=1e-6)
        d_scores, d_alpha = native.gradients(solved.probs, x, alpha, True, True)
        wide = gradient.gradients(solved.probs.double(), x.double(), alpha.double(), True, True)
        torch.testing.assert_close(d_scores, wide[0].float(), atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]
        torch.testing.assert_close(d_alpha, wide[1].float(), atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]
    for empty in (x[:0], x[..., :0]):
        assert native.solve_rows(empty, 1.5).probs.shape == empty.shape


def test_what_is_not_asked_for_is_not_returned() -> None:
    probs = native.solve_rows(_rows(17, 1.0), 1.3).probs
    upstream = scores(24, 17, dtype=torch.float32)
    both = native.gradients(probs, upstream, 1.3, True, True)
    scores_only = native.gradients(probs, upstream, 1.3, True, False)
    alpha_only = native.gradients(probs, upstream, 1.3, False, True)
    assert scores_only[1] is None
    assert alpha_only[0] is None
    assert torch.equal(scores_only[0], both[0])  # type: ignore[arg-type]
    assert torch.equal(alpha_only[1], both[1])  # type: ignore[arg-type]
    assert native.gradients(probs, upstream, 1.3, False, False) == (None, None)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, "per row"], ids=str)
def test_neither_threads_nor_the_batch_change_a_bit(alpha: float | str) -> None:
    x = torch.cat([_rows(20_011, scale) for scale in (0.1, 1.0, 10.0)])
    value = torch.linspace(1, 2, len(x))[:, None] if alpha == "per row" else float(alpha)
    upstream = scores(*x.shape, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5, 64):
            torch.set_num_threads(threads)
            solved = native.solve_rows(x, value)
            results.append((*solved, *native.gradients(solved.probs, upstream, value, True, True)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))  # type: ignore[arg-type]
    for row in (0, 13, 23):
        own = value[row] if isinstance(value, Tensor) else value
        assert native.solve_rows(x[row], own).probs.equal(results[0][0][row])


@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 33, 255, 257, 1025])
def test_nothing_is_written_outside_the_rows_and_nothing_is_left_unwritten(n: int) -> None:
    canary, rows = 123.0, 3
    x, eps = scores(rows, n, dtype=torch.float32), torch.tensor([0.3], dtype=torch.float64)
    for name, inputs, sizes in [
        ("sparseformer_entmax_solve", (x,), (rows * n, rows, rows)),
        ("sparseformer_entmax_gradients", (torch.softmax(x, -1), x), (rows * n, rows)),
    ]:
        guarded = [torch.full((size + 64,), canary) for size in sizes]
        inner = tuple(buffer[32 : size + 32] for buffer, size in zip(guarded, sizes, strict=True))
        native._call(name, inputs=inputs, eps=eps, outputs=inner)
        for buffer, size in zip(guarded, sizes, strict=True):
            assert buffer[:32].eq(canary).all()
            assert buffer[size + 32 :].eq(canary).all()
            assert buffer[32 : size + 32].ne(canary).all()
    with poison_empty():
        solved = native.solve_rows(_rows(n, 1.0), 1.3)
        results = (*solved, *native.gradients(solved.probs, _rows(n, 1.0).exp(), 1.3, True, True))
    assert all(result.isfinite().all() for result in results if result is not None)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0], ids=str)
@pytest.mark.parametrize("bad", [math.nan, INF], ids=str)
@pytest.mark.parametrize("n", [3, 40, 300])
def test_a_nan_or_infinity_stays_in_its_row_and_shows(alpha: float, bad: float, n: int) -> None:
    x = scores(4, n, dtype=torch.float32)
    x[1, n // 2] = bad
    x[2] = -INF
    x[2, 1] = bad
    probs = native.solve_rows(x, alpha).probs
    assert probs[1:3].isnan().all()
    assert probs[[0, 3]].equal(native.solve_rows(x[[0, 3]], alpha).probs)
    d_scores, d_alpha = native.gradients(probs, torch.ones_like(x), alpha, True, True)
    assert d_scores is not None
    assert d_alpha is not None
    assert d_scores[1:3].isnan().all()
    assert d_alpha[1:3].isnan().all()
    assert d_scores[[0, 3]].isfinite().all()


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30, 0.0, 3e38], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0], ids=str)
def test_equal_scores_of_any_size_share_evenly(alpha: float, value: float) -> None:
    probs = native.solve_rows(torch.full((2, 300), value), alpha).probs
    torch.testing.assert_close(probs, torch.full((2, 300), 1 / 300), atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0], ids=str)
def test_the_public_function_gives_the_same_on_both_backends(
    alpha: float, dtype: torch.dtype
) -> None:
    def run(backend: str) -> tuple[Tensor, ...]:
        at = scores(5, 4, 60, dtype=torch.float32).to(dtype).requires_grad_()
        learned = torch.full((4, 1), alpha, requires_grad=True)
        p = entmax(at, learned, backend=backend)  # type: ignore[arg-type]
        upstream = scores(5, 4, 60, seed=1, dtype=torch.float32).to(dtype)
        return (p.detach(), *torch.autograd.grad(p, (at, learned), upstream))

    bound = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(run("cpp"), run("pytorch"), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=max(bound, 2e-6), rtol=max(bound, 1e-5))
