"""Entmax's forward row kernels against the float64 reference, in both regimes.

Matrix rows M1 (lengths, alphas, scales, ties), M8 (dtypes), M9 (strides), M10 (poison, guard
bands), M11 (a row doesn't depend on its neighbours) and M13 (magnitudes).
"""

import pytest
import torch
from entmax_rows_case import ALPHAS, BLOCK, INF, each_alpha, exact, plain, scores, solve
from torch import Tensor

from sparseformer.kernels.entmax.forward import MAX_TILE, entmax_forward, launch_rows
from sparseformer.kernels.entmax.row_input import split_alpha
from sparseformer.testing import assert_close_to_reference, poison_empty

REGIMES = pytest.mark.parametrize("long", [False, True], ids=["tile", "long"])
# Softmax, both short ways, and the general one by float and by tensor.
KINDS = [1.0, 1.3, 1.5, 2.0, 3.0, torch.tensor([1.3])]
KIND_IDS = ["softmax", "float", "entmax15", "sparsemax", "steep", "tensor"]
SMOOTH = pytest.mark.parametrize("alpha", KINDS[:4], ids=KIND_IDS[:4])


def check(p: Tensor, x: Tensor, alpha: float | Tensor) -> None:
    expected = exact(x, alpha)
    assert_close_to_reference(p, expected, plain(x, alpha))
    assert bool(((p > 0) <= (x > -INF)).all())
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-12}[p.dtype]
    mass = p.double().sum(-1)
    torch.testing.assert_close(mass, expected.sum(-1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 33, 100, 129, 1000])
def test_rows_of_any_length_and_alpha_equal_float64(n: int) -> None:
    x = scores(len(ALPHAS), n, seed=n)
    check(solve(x, each_alpha()), x, each_alpha())
    for alpha in ALPHAS:
        check(solve(x[:2], alpha), x[:2], alpha)


@pytest.mark.parametrize("n", [33, 64, 100, 129])
def test_long_rows_of_any_alpha_equal_float64(n: int) -> None:
    x = scores(len(ALPHAS), n, seed=n)
    check(solve(x, each_alpha(), long=True), x, each_alpha())
    for alpha in ALPHAS:
        check(solve(x[:1], alpha, long=True), x[:1], alpha)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0], ids=str)
def test_a_row_beyond_the_largest_tile_equals_float64(alpha: float) -> None:
    x = scores(1, MAX_TILE + 1)
    check(solve(x, alpha), x, alpha)


@REGIMES
@pytest.mark.parametrize("alpha", KINDS, ids=KIND_IDS)
def test_no_lane_hides_a_key_of_the_support(alpha: float | Tensor, long: bool) -> None:
    """Three scores of one lane are in the support, of which a lane keeps two."""
    x = torch.full((1, 4 * BLOCK), -9.0)
    x[0, 5::BLOCK] = torch.tensor([0.03, 0.0, -0.01, 0.02])
    check(solve(x, alpha, long), x, alpha)
    assert int((solve(x, alpha, long)[0, 5::BLOCK] > 0).sum()) == 4


@REGIMES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_equal_float64(dtype: torch.dtype, long: bool) -> None:
    x = scores(len(ALPHAS), 50, dtype=dtype)
    alpha = each_alpha(torch.promote_types(dtype, torch.float32))
    check(solve(x, alpha, long), x, alpha)
    for value in (1.0, 1.1, 1.5, 2.0):
        check(solve(x[:1], value, long), x[:1], value)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4], ids=str)
@REGIMES
def test_scores_of_any_magnitude_equal_float64(scale: float, long: bool) -> None:
    x = scores(len(ALPHAS), 50, scale=scale)
    check(solve(x, each_alpha(), long), x, each_alpha())
    for value in (1.0, 1.5, 2.0):
        check(solve(x[:1], value, long), x[:1], value)


@REGIMES
@SMOOTH
def test_the_largest_half_floats_stay_finite(alpha: float | Tensor, long: bool) -> None:
    x = torch.zeros(2, 40, dtype=torch.float16)
    x[0, :3] = torch.tensor([65504.0, 65472.0, -65504.0])
    x[1] = -65504.0
    check(solve(x, alpha, long), x, alpha)


@REGIMES
@SMOOTH
def test_ties_constant_rows_and_one_hot_rows(alpha: float | Tensor, long: bool) -> None:
    x = torch.zeros(3, 48)
    x[0] = torch.tensor([1.0, 1.0, 0.5, 0.5]).repeat(12)
    x[1] = 7.25
    x[2, 3] = 100.0
    p = solve(x, alpha, long)
    check(p, x, alpha)
    assert bool((p[0, ::4] == p[0, 0]).all())
    torch.testing.assert_close(p[1], torch.full((48,), 1 / 48), rtol=2e-6, atol=0)
    assert p[2, 3] == 1.0


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 1.9, 2.0], ids=str)
def test_100000_equal_scores_are_normalised(alpha: float) -> None:
    p = entmax_forward(torch.full((1, 100_000), 3.0), alpha)
    assert p.double().sum().item() == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(p, torch.full_like(p, 1e-5), rtol=1e-5, atol=0)


@REGIMES
@pytest.mark.parametrize("alpha", KINDS, ids=KIND_IDS)
def test_excluded_scores_get_nothing_and_change_nothing(alpha: float | Tensor, long: bool) -> None:
    x = scores(3, 40)
    x[0, 1::2] = -INF
    x[1] = -INF
    x[2, :39] = -INF
    p = solve(x, alpha, long)
    check(p, x, alpha)
    assert not p[0, 1::2].any()
    assert not p[1].any()
    assert p[2, 39] == 1.0
    torch.testing.assert_close(p[:1, ::2], solve(x[:1, ::2], alpha), atol=2e-7, rtol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@REGIMES
@pytest.mark.parametrize("bad", [float("nan"), INF], ids=str)
@pytest.mark.parametrize("alpha", KINDS, ids=KIND_IDS)
def test_nan_and_inf_spoil_their_own_row_only(
    alpha: float | Tensor, bad: float, long: bool
) -> None:
    x = scores(2, 34)
    x[1, 7], x[1, 8] = bad, -INF
    p = solve(x, alpha, long)
    assert bool(p[1].isnan().all())
    torch.testing.assert_close(p[:1], solve(x[:1], alpha, long), atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@REGIMES
def test_a_nan_alpha_spoils_its_own_row_only(long: bool) -> None:
    p = solve(scores(2, 40), torch.tensor([float("nan"), 1.5]), long)
    assert bool(p[0].isnan().all())
    assert p[1].sum().item() == pytest.approx(1.0, abs=1e-6)


@REGIMES
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda: scores(40, 3).t(), id="transposed"),
        pytest.param(lambda: scores(3, 80)[:, ::2], id="every second column"),
        pytest.param(lambda: scores(6, 50)[1::2, 10:], id="offset and row stride"),
        pytest.param(lambda: scores(1, 40).expand(3, 40), id="expanded rows"),
        pytest.param(lambda: scores(3, 1).expand(3, 40), id="expanded columns"),
    ],
)
def test_any_strides_equal_contiguous_rows(view, long: bool) -> None:  # type: ignore[no-untyped-def]
    x = view()
    for alpha in (1.0, 1.5, torch.tensor([[1.2, 1.0], [1.7, 9.0], [2.0, 9.0]])[:, 0]):
        p = solve(x, alpha, long)
        assert p.is_contiguous()
        assert torch.equal(p, solve(x.contiguous(), alpha, long))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.7], ids=str)
def test_offsets_beyond_32_bits(alpha: float) -> None:
    """A row stride, or a column stride, whose multiple passes 2**31 elements."""
    storage = torch.empty(2**31 + 2**29, dtype=torch.float16)
    x = scores(2, 4, dtype=torch.float16)
    for strides in ((2**31 + 8, 1), (1, 2**29 + 2**27 + 1)):
        view = storage.as_strided((2, 4), strides)
        view.copy_(x)
        assert torch.equal(entmax_forward(view, alpha), entmax_forward(x, alpha))


@REGIMES
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5], ids=str)
def test_writes_every_entry_and_nothing_else(alpha: float, long: bool) -> None:
    x = scores(3, 41)
    with poison_empty():
        check(solve(x, alpha, long), x, alpha)
    buffer = torch.full((3 * 41 + 16,), 1234.5)
    probs = buffer[8:-8].view(3, 41)
    launch_rows(x, split_alpha(alpha, x), probs, BLOCK if long else MAX_TILE)
    assert bool((buffer[:8] == 1234.5).all())
    assert bool((buffer[-8:] == 1234.5).all())
    check(probs, x, alpha)


@REGIMES
def test_a_row_is_the_same_alone_and_in_a_batch(long: bool) -> None:
    """Rows that share a program stop climbing on their own."""
    x = torch.cat([scores(2, 40, scale=scale) for scale in (1e-3, 1.0, 30.0)])
    for alpha in (1.0, 1.2, 1.9):
        batch = solve(x, alpha, long)
        alone = torch.cat([solve(row[None], alpha, long) for row in x])
        assert torch.equal(batch, alone), f"alpha {alpha}"


@REGIMES
@pytest.mark.parametrize("alpha", [2.5, 4.0, 10.0], ids=str)
def test_steep_rows_keep_every_digit(alpha: float, long: bool) -> None:
    """For two scores p solves p1**eps - p2**eps = eps (x1 - x2), which gives x from p."""
    eps = alpha - 1
    second = torch.tensor([0.5, 0.3, 1e-2, 1e-4, 1e-7, 1e-12], dtype=torch.float64)
    gap = ((1 - second) ** eps - second**eps) / eps
    x = torch.full((6, 33), -5.0)
    x[:, 0], x[:, 32] = gap.float(), 0.0
    if long:
        x = x[3:]
    for given in (alpha, torch.full((len(x),), alpha)):
        p = solve(x, given, long)
        check(p, x, given)
        assert bool((p[:, 1:32] == 0).all())


def test_rows_on_both_sides_of_sparsemax_share_a_program() -> None:
    x = scores(4, 20)
    alpha = torch.tensor([1.0, 2.0, 2.0001, 6.0])
    check(solve(x, alpha), x, alpha)


def test_a_learned_alpha_of_1_is_softmax() -> None:
    x = scores(3, 60)
    for long in (False, True):
        p = solve(x, torch.tensor([1.0]), long)
        # The eps that stands for 0 costs eps log(p)**2 / 2.
        torch.testing.assert_close(p, torch.softmax(x, -1), rtol=2e-5, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_empty_input_gives_empty_output(shape: tuple[int, int]) -> None:
    assert entmax_forward(torch.zeros(shape), 1.5).shape == shape


def test_bfloat16_comes_back_as_bfloat16() -> None:
    x = scores(2, 9).bfloat16()
    p = entmax_forward(x, 1.5)
    assert p.dtype == torch.bfloat16
    assert_close_to_reference(p, exact(x, 1.5), plain(x, 1.5))
