"""Solving t on the sketch of a block of queries: few steps, and only over scores that count."""

from collections import Counter
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.entmax.reference import solve_threshold
from sparseformer.kernels.entmax_attention import sketch
from sparseformer.kernels.entmax_attention.launch_table import EXCESS, EXCESS_KEPT, close_enough

ROUNDING = 2.0**-22
LANES: tl.constexpr = tl.constexpr(16)
DEPTH: tl.constexpr = tl.constexpr(4)


@triton.jit
def _solve_kernel(tops_ptr, t_ptr, eps, CLOSE: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    place = tops_ptr + rows[:, None] * LANES * DEPTH + lanes[None, :]
    top1, top2 = tl.load(place), tl.load(place + LANES)
    top3, top4 = tl.load(place + 2 * LANES), tl.load(place + 3 * LANES)
    t = sketch.solve_on_sketch(
        tl.max(top1, 1), top1, top2, top3, top4, eps, 64, CLOSE, 2.0**-22, EPS, False, DEPTH
    )
    tl.store(t_ptr + rows, t)


def sketched(scores: Tensor) -> Tensor:
    """Return the scores of each row so that each lane is sorted, [rows, depth, lanes]."""
    return scores.unflatten(1, (4, 16)).sort(1, descending=True).values.contiguous()


def solve(scores: Tensor, alpha: float, close: float) -> Tensor:
    t = torch.full((len(scores),), torch.nan, dtype=scores.dtype)
    eps = alpha - 1.0
    fixed = eps if eps in (0.5, 1.0) else None
    _solve_kernel[(1,)](sketched(scores), t, eps, CLOSE=close, EPS=fixed, ROWS=len(scores))
    return t


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the device functions that the solver calls."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> None:
        function = getattr(sketch, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(sketch, name, call)

    counted("newton_step")
    counted("tile_powers")
    return counts


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.8, 2.0], ids=str)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0], ids=str)
def test_t_is_that_of_all_scores(alpha: float, spread: float) -> None:
    scores = spread * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    exact = solve_threshold(scores.double(), torch.tensor(alpha, dtype=torch.float64)).squeeze(-1)
    found = solve(scores, alpha, 0.0).double()
    torch.testing.assert_close(found, exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("alpha", [1.001, 1.05, 1.3, 1.5, 1.8, 2.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [False, True], ids=["inference", "training"])
def test_a_step_from_close_enough_leaves_half_of_the_excess(
    alpha: float, dtype: torch.dtype, keep: bool
) -> None:
    draw = torch.Generator().manual_seed(1)
    spread = torch.logspace(-2, 1, 32)[:, None]
    scores = spread * torch.randn(32, 64, generator=draw)
    t = solve(scores, alpha, close_enough(dtype, keep)).double()[:, None]
    eps = alpha - 1.0
    mass = (1 + eps * (scores.double() - t)).clamp(min=0).pow(1 / eps).sum(1)
    excess = (EXCESS_KEPT if keep else EXCESS)[dtype]
    # Rounding of t, in fp32 here for any dtype of the inputs.
    assert (mass - 1).max() <= 0.5 * excess + 1e-6
    assert (mass - 1).min() >= -1e-5


def test_scores_below_every_support_are_not_looked_at(calls: Counter[str]) -> None:
    scores = torch.full((8, 64), -9.0)
    scores[:, :16] = 0.1 * torch.arange(16)
    solve(scores, 1.5, 0.0)
    assert calls["tile_powers"] == calls["newton_step"] > 1


def test_scores_of_a_level_count_as_soon_as_one_row_needs_them(calls: Counter[str]) -> None:
    scores = torch.full((8, 64), -9.0)
    scores[:, :16] = 0.1 * torch.arange(16)
    scores[5, 16 + 3] = 1.0
    t = solve(scores, 1.5, 0.0).double()
    assert calls["tile_powers"] == 2 * calls["newton_step"]
    exact = solve_threshold(scores.double(), torch.tensor(1.5, dtype=torch.float64)).squeeze(-1)
    torch.testing.assert_close(t, exact, rtol=3e-6, atol=3e-6)


def test_close_enough_saves_steps(calls: Counter[str]) -> None:
    scores = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    solve(scores, 1.5, 0.0)
    exact = calls["newton_step"]
    solve(scores, 1.5, close_enough(torch.float16, keep=True))
    assert calls["newton_step"] - exact <= exact - 2
