"""The counter of benchmarks/attention_work.py counts what an interpreted kernel did, by kernel."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE: tl.constexpr = tl.constexpr(32)


@triton.jit
def _square_kernel(x_ptr, y_ptr, num_rows):
    rows, cols = tl.arange(0, SIZE), tl.arange(0, SIZE)
    offsets = rows[:, None] * SIZE + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=rows[:, None] < num_rows, other=0.0)
    tl.store(y_ptr + offsets, tl.dot(x, x), mask=rows[:, None] < num_rows)


def test_work_of_a_kernel_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from interpreted_work import counting

    x, y = torch.ones(32, 32, dtype=torch.float16), torch.zeros(32, 32)
    with counting() as counts:
        for _ in range(2):
            _square_kernel[(3,)](x, y, 5)
    work = counts.kernels["_square_kernel"]
    # Twice three programs, of 32 x 32 x 32 multiply-adds, which see 5 rows of fp16 and of fp32.
    assert work.products == 6 * 32**3 / 64**3
    assert work.loaded == 6 * 5 * 32 * 2
    assert work.stored == 6 * 5 * 32 * 4
    assert counts.total() == work


def test_nothing_is_counted_outside_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from interpreted_work import counting

    x, y = torch.ones(32, 32, dtype=torch.float16), torch.zeros(32, 32)
    with counting() as counts:
        pass
    _square_kernel[(1,)](x, y, 32)
    assert counts.kernels == {}
