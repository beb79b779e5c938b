"""What entmax's row kernels read and write, and the digits of their device functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from entmax_rows_case import BLOCK, INF, gradients, scores, solve
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from sparseformer.kernels.entmax.device import expm1, log1p, powers


@dataclass
class Traffic:
    """Bytes that kernels have loaded and stored."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the unmasked elements of every load and store inside the context."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        value = load(self, pointers, mask, *rest)
        full = np.broadcast_to(mask.data, value.data.shape)
        traffic.loaded += int(np.count_nonzero(full)) * value.data.itemsize
        return value

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        full = np.broadcast_to(mask.data, value.data.shape)
        traffic.stored += int(np.count_nonzero(full)) * value.data.itemsize
        return store(self, pointers, value, mask, *rest)

    patch = pytest.MonkeyPatch()
    patch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
    patch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
    with patch.context():
        try:
            yield traffic
        finally:
            patch.undo()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 3.0], ids=str)
def test_a_row_in_registers_is_read_and_written_once(alpha: float, dtype: torch.dtype) -> None:
    x, grad = scores(5, 100, dtype=dtype), scores(5, 100, dtype=dtype, seed=1)
    size = x.numel() * x.element_size()
    with counted() as forward:
        p = solve(x, alpha)
    assert (forward.loaded, forward.stored) == (size, size)
    with counted() as backward:
        gradients(p, grad, alpha)
    assert (backward.loaded, backward.stored) == (2 * size, size + 5 * 4)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0], ids=str)
def test_a_long_row_with_few_keys_in_the_support_is_read_twice(alpha: float) -> None:
    """Softmax reads any row twice; otherwise the kept scores must hold the support."""
    x = torch.full((1, 10 * BLOCK), -9.0)
    x[0, ::7] = -5.0
    x[0, 3:9] = torch.tensor([0.0, -0.1, 0.05, -0.2, -0.1, 0.3])
    with counted() as forward:
        p = solve(x, alpha, long=True)
    assert forward.loaded == 2 * 4 * x.numel()
    assert forward.stored == 4 * x.numel()
    with counted() as backward:
        gradients(p, x, alpha, long=True)
    assert backward.loaded == 4 * 4 * x.numel()


@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.9, 2.0], ids=str)
def test_a_long_row_whose_support_is_wide_is_read_few_times(alpha: float) -> None:
    x = scores(1, 10 * BLOCK, scale=0.3)
    with counted() as forward:
        solve(x, alpha, long=True)
    assert forward.loaded <= 8 * 4 * x.numel()


@triton.jit
def _apply_kernel(x_ptr, log_ptr, exp_ptr, p_ptr, u_ptr, eps, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    offsets = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offsets)
    tl.store(log_ptr + offsets, log1p(x))
    tl.store(exp_ptr + offsets, expm1(x))
    probs, slopes = powers(x, eps, None)
    tl.store(p_ptr + offsets, probs)
    tl.store(u_ptr + offsets, slopes)


def apply(x: Tensor, eps: float) -> list[Tensor]:
    results = [torch.full_like(x, torch.nan) for _ in range(4)]
    _apply_kernel[(1,)](x, *results, eps, BLOCK_N=len(x))
    return [result.double() for result in results]


def small_and_large() -> Tensor:
    """512 numbers of every magnitude above -1, both signs up to there."""
    size = torch.logspace(-12, 1.5, 256)
    return torch.cat([size, -torch.logspace(-12, -1e-6, 256)])


def test_logarithm_and_exponential_keep_their_digits_near_0() -> None:
    x = small_and_large()
    log, exp, _, _ = apply(x, 1.0)
    torch.testing.assert_close(log, torch.log1p(x.double()), rtol=1.5e-7, atol=0)
    torch.testing.assert_close(exp, torch.expm1(x.double()), rtol=3e-6, atol=0)


@pytest.mark.parametrize("eps", [1.2e-7, 1e-4, 0.05, 0.3, 0.9], ids=str)
def test_powers_keep_their_digits_for_any_alpha(eps: float) -> None:
    x = -torch.logspace(-6, 2, 256)
    x[-1] = -INF
    _, _, p, u = apply(x, eps)
    # The kernel's eps is fp32.
    eps = torch.tensor(eps, dtype=torch.float32).double().item()
    w = (eps * x.double()).clamp(min=-1)
    expected = torch.where(w > -1, torch.exp(torch.log1p(w) / eps), 0.0)
    torch.testing.assert_close(p, expected, rtol=3e-5, atol=1e-7)
    torch.testing.assert_close(u, expected / (1 + w).clamp(min=1e-30), rtol=3e-5, atol=3e-7)
    assert bool((p[expected == 0] == 0).all())
