"""p, u and the alpha term of 16-bit inputs, with a logarithm as rough as a GPU's own."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseformer.kernels.entmax.device import TINY
from sparseformer.kernels.entmax_attention import powers

EPS = [1.2e-7, 1e-4, 0.01, 0.05, 0.3, 0.9, 1.0]
# Half a unit in the last place of fp16 is 2.4e-4 of p or more.
RTOL = 1e-4


@triton.jit
def _rough_log2(x):  # type: ignore[no-untyped-def]
    """Return quick_log2 with the largest error that it may have, up or down by x's last bit."""
    exact = tl.where(x > 0.0, tl.log2(tl.maximum(x, TINY)), float("-inf"))
    size = tl.maximum(tl.abs(tl.maximum(exact, -256.0)), 1.0) * 2.0**-22
    return exact + tl.where((x.to(tl.int32, bitcast=True) & 1) == 0, size, -size)


@pytest.fixture(autouse=True)
def _rough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(powers, "quick_log2", _rough_log2)


@triton.jit
def _apply_kernel(x_ptr, p_ptr, u_ptr, term_ptr, eps, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    offsets = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offsets)
    probs, slopes, fall = powers.learned_powers(x, eps, True)
    tl.store(p_ptr + offsets, probs)
    tl.store(u_ptr + offsets, slopes)
    tl.store(term_ptr + offsets, powers.learned_alpha_term(probs, slopes, fall))


def apply(x: Tensor, eps: float) -> list[Tensor]:
    """Return p, u and eps**2 p g at distances x."""
    results = [torch.full_like(x, torch.nan) for _ in range(3)]
    _apply_kernel[(1,)](x, *results, eps, BLOCK_N=len(x))
    return [result.double() for result in results]


def distances(eps: float) -> Tensor:
    """Distances from just above t down to the border of the support, and beyond it."""
    inside = -torch.logspace(-6, 2, 240)
    # Closer to the border, the rounding of the distance itself shows.
    border = -(1 - torch.logspace(-4, -1, 8)) / eps
    outside = torch.tensor([-1.0001 / eps, -2 / eps, -1e30, -torch.inf])
    return torch.cat([inside, border, outside, torch.tensor([0.0, 1e-6, 1e-3, 0.2])])


def expected(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, u and eps**2 p g in float64, eps as the kernel has it."""
    eps = torch.tensor(eps, dtype=torch.float32).double().item()
    gap = (eps * x.double()).clamp(min=-1)
    log_w = torch.where(gap > -1, torch.log1p(gap), -torch.inf)
    p = torch.exp(log_w / eps)
    u = torch.where(gap > -1, torch.exp(log_w * (1 / eps - 1)), 0.0)
    fall = torch.where(gap > -1, -log_w, 0.0)
    return p, u, p * (fall - torch.expm1(fall))


@pytest.mark.parametrize("eps", EPS, ids=str)
def test_are_exact_to_less_than_the_rounding_of_fp16(eps: float) -> None:
    x = distances(eps)
    p, u, _ = expected(x, eps)
    found_p, found_u, _ = apply(x, eps)
    torch.testing.assert_close(found_p, p, rtol=RTOL, atol=3e-8)
    torch.testing.assert_close(found_u, u, rtol=RTOL, atol=3e-8)


@pytest.mark.parametrize("eps", EPS, ids=str)
def test_the_alpha_term_keeps_its_digits_near_softmax_and_at_the_border(eps: float) -> None:
    x = distances(eps)
    _, _, found = apply(x, eps)
    torch.testing.assert_close(found / eps**2, expected(x, eps)[2] / eps**2, rtol=3e-4, atol=1e-6)


@pytest.mark.parametrize("eps", EPS, ids=str)
def test_are_exactly_zero_off_the_support(eps: float) -> None:
    outside = eps * distances(eps).double() < -1
    assert outside.sum() >= 4
    for found in apply(distances(eps), eps):
        assert not found[outside].any()


def test_the_rough_logarithm_is_what_was_tested() -> None:
    """An exact one would hide what the GPU's rounding does."""
    x = torch.linspace(-4, -1, 256)
    p, _, _ = expected(x, 0.05)
    assert ((apply(x, 0.05)[0] / p - 1).abs() > 1e-6).any()
