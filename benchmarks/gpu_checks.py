"""The checks that benchmarks/gpu.py runs on every kernel: errors against float64, repetition."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseformer.functional import (
    entmax,
    entmax_attention,
    entmax_loss,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
)
from sparseformer.testing import Kind, assert_close_to_reference


class Check(NamedTuple):
    """A name and what raises when it doesn't hold."""

    name: str
    run: Callable[[], None]


class Problem(NamedTuple):
    """A function of tensors and a backend, and its inputs; the first ones are differentiable.

    Attributes:
        name: what is computed, on which shape.
        function: called with the differentiable tensors and backend=.
        tensors: float32, rounded to the dtype under test before the reference sees them.
        keep_wide: how many of the last tensors keep fp32, such as alpha.
    """

    name: str
    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    keep_wide: int = 0


def checks(device: torch.device) -> Iterator[Check]:
    """Compare results and gradients in each dtype with the PyTorch backend in float64."""
    # On a CPU this only shows that the script starts.
    dtypes = [torch.float32]
    if device.type == "cuda":
        dtypes += [torch.float16, torch.bfloat16]
    for problem in _problems(device):
        for dtype in dtypes:
            name = f"{problem.name}, {str(dtype).removeprefix('torch.')}"
            yield Check(name, partial(_compare, problem, dtype))


def repeated(device: torch.device, times: int) -> Iterator[Check]:
    """Hold that a repeated call gives the same bits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for problem in _problems(device):
        name = f"{problem.name}: {times} repeats are equal"
        yield Check(name, partial(_repeat, problem, dtype, times))


def _compare(problem: Problem, dtype: torch.dtype) -> None:
    rounded = _rounded(problem, dtype)
    wide = tuple(x.double() for x in rounded)
    expected = _results(problem.function, wide, "pytorch")
    baseline = _results(problem.function, rounded, "pytorch")
    actual = _results(problem.function, rounded, "triton")
    for index, (found, exact, plain) in enumerate(zip(actual, expected, baseline, strict=True)):
        kind: Kind = "forward" if index == 0 else "gradient"
        # Losses and d alpha come in fp32 also from narrower inputs, whose rounding they carry. In
        # fp32 the error of PyTorch is noise on some of these shapes, so the RMS bound is taken.
        baseline_of = None if dtype == torch.float32 else plain.to(dtype)
        assert_close_to_reference(found.to(dtype), exact, baseline_of, kind=kind)


def _repeat(problem: Problem, dtype: torch.dtype, times: int) -> None:
    rounded = _rounded(problem, dtype)
    first = _results(problem.function, rounded, "triton")
    for _ in range(times - 1):
        for x, y in zip(first, _results(problem.function, rounded, "triton"), strict=True):
            assert torch.equal(x, y), "two runs differ"


def _rounded(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, ...]:
    narrow = len(problem.tensors) - problem.keep_wide
    return tuple(x.to(dtype) if i < narrow else x for i, x in enumerate(problem.tensors))


def _results(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], backend: str
) -> list[Tensor]:
    """Return the result and the gradients of a weighted sum of it."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    result = function(*leaves, backend=backend)
    generator = torch.Generator(result.device).manual_seed(1)
    upstream = torch.randn(result.shape, generator=generator, device=result.device)
    grads = torch.autograd.grad(result, leaves, upstream.to(result.dtype))
    return [result.detach(), *grads]


def _problems(device: torch.device) -> Iterator[Problem]:
    torch.manual_seed(0)
    large = device.type == "cuda"
    yield from _map_problems(device, large)
    yield from _loss_problems(device, large)
    yield from _attention_problems(device, large)


def _map_problems(device: torch.device, large: bool) -> Iterator[Problem]:
    shapes = ((64, 100), (33, 4096), (4, 100_000)) if large else ((5, 33),)
    for shape in shapes:
        x = 2 * torch.randn(shape, device=device)
        for alpha in (1.0, 1.5, 2.0):
            yield Problem(f"entmax {alpha}, {list(shape)}", partial(entmax, alpha=alpha), (x,))
        learned = 1 + torch.rand(shape[0], 1, device=device)
        yield Problem(f"entmax learned, {list(shape)}", entmax, (x, learned), keep_wide=1)


def _loss_problems(device: torch.device, large: bool) -> Iterator[Problem]:
    tokens, width, vocab = (300, 256, 5003) if large else (6, 16, 40)
    k = 64 if large else 8
    z = 2 * torch.randn(tokens, vocab, device=device)
    h = torch.randn(tokens, width, device=device)
    w = 2 * torch.randn(vocab, width, device=device) * width**-0.5
    y = torch.randint(vocab, (tokens,), device=device)
    y[::7] = -100

    def on_logits(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        return lambda z, backend: function(z, y, reduction="none", backend=backend, **options)

    def on_hidden(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        return lambda h, w, backend: function(h, w, y, reduction="none", backend=backend, **options)

    shape = f"{tokens} x {width}, V = {vocab}"
    yield Problem(f"sparse_cross_entropy, {shape}", on_logits(sparse_cross_entropy, k=k), (z,))
    yield Problem(f"entmax_loss 1.5, {shape}", on_logits(entmax_loss), (z,))
    top_k = on_hidden(linear_sparse_cross_entropy, k=k, chunk_size=64)
    yield Problem(f"linear_sparse_cross_entropy, {shape}", top_k, (h, w))
    for alpha in (1.5, 2.0):
        function = on_hidden(linear_entmax_loss, alpha=alpha, chunk_size=64)
        yield Problem(f"linear_entmax_loss {alpha}, {shape}", function, (h, w))


def _attention_problems(device: torch.device, large: bool) -> Iterator[Problem]:
    length, dim = (257, 64) if large else (20, 16)
    for alpha in (1.0, 1.5, 2.0, None):
        for causal in (False, True):
            yield _attention(device, alpha, (length, length), dim, is_causal=causal)
    yield _attention(device, 1.5, (1, length), dim)
    yield _attention(device, 1.5, (length, length + 30), dim, window=(9, 4), kv_heads=1)
    if large:
        for dim in (40, 128, 256):
            yield _attention(device, None, (129, 200), dim, is_causal=True)
        yield _attention(device, 1.5, (2048, 2048), 64, is_causal=True)
        # Where a GPU's own logarithm has the fewest digits left.
        yield _attention(device, None, (length, length), dim, alphas=(1.0, 1.002))


def _attention(
    device: torch.device,
    alpha: float | None,
    lengths: tuple[int, int],
    dim: int,
    kv_heads: int = 2,
    alphas: tuple[float, float] = (1.05, 1.95),
    **options: Any,
) -> Problem:
    q = 2 * torch.randn(2, 4, lengths[0], dim, device=device)
    k, v = torch.randn(2, 2, kv_heads, lengths[1], dim, device=device)
    shape = f"[2, 4/{kv_heads}, {lengths[0]}, {dim}] on {lengths[1]} keys {options or ''}"
    name = f"attention {alpha or f'learned {alphas}'}, {shape}"
    if alpha is not None:
        return Problem(name, partial(entmax_attention, alpha=alpha, **options), (q, k, v))
    learned = torch.linspace(*alphas, 4, device=device)
    return Problem(name, partial(entmax_attention, **options), (q, k, v, learned), keep_wide=1)
