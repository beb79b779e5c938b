"""The calls that benchmarks/gpu.py times: ours, and those of peers that can be imported."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseformer.functional import (
    entmax,
    entmax_attention,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
)

PACKAGES = ("torch", "triton", "adasplash", "entmax", "liger-kernel")
Timed = tuple[str, str, Callable[[], Tensor], tuple[Tensor, ...]]


def versions(device: torch.device) -> str:
    """Name the device and the packages, and those that are missing."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return f"{name}; {', '.join(found)}"


def timed_calls() -> Iterator[Timed]:
    """Yield all calls, the most telling first."""
    for length in (4096, 16384, 1024, 2048, 8192, 32768, 65536):
        yield from _attention(length)
    yield from _losses()
    yield from _maps()


def _attention(length: int) -> Iterator[Timed]:
    """Causal, 16 heads of 64 in bf16, 32k tokens in all; scores of standard deviation 2."""
    batch, heads = max(32768 // length, 1), 16
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(batch, heads, length, 64, **options) for _ in range(3))
    inputs = (q.mul_(2).requires_grad_(), k.requires_grad_(), v.requires_grad_())
    alpha = torch.linspace(1.1, 1.9, heads, device="cuda").requires_grad_()
    shape = f"causal attention, {list(q.shape)}"
    yield shape, "ours 1.5", lambda: entmax_attention(*inputs, 1.5, is_causal=True), inputs
    peers = _optional("adasplash")
    if peers:
        yield shape, "adasplash v2", lambda: peers.adasplash_v2(*inputs), inputs
    yield (
        shape,
        "F.scaled_dot_product_attention",
        lambda: F.scaled_dot_product_attention(*inputs, is_causal=True),
        inputs,
    )
    learned = (*inputs, alpha)
    yield shape, "ours learned", lambda: entmax_attention(*inputs, alpha, is_causal=True), learned
    yield shape, "ours 1 (softmax)", lambda: entmax_attention(*inputs, 1.0, is_causal=True), inputs
    yield shape, "ours 2", lambda: entmax_attention(*inputs, 2.0, is_causal=True), inputs
    if peers:

        def first_version() -> Tensor:
            return peers.adasplash_v1(*inputs, is_causal=True)

        yield shape, "adasplash v1", first_version, inputs


def _losses() -> Iterator[Timed]:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for vocab in (50_304, 131_072):
        h = torch.randn(8192, 1024, **options).requires_grad_()
        w = (torch.randn(vocab, 1024, **options) / 32).requires_grad_()
        y = torch.randint(vocab, (8192,), device="cuda")
        shape, inputs = f"loss, 8192 x 1024, V = {vocab:,}", (h, w)

        def top_k(h=h, w=w, y=y) -> Tensor:
            return linear_sparse_cross_entropy(h, w, y, k=64)

        def entmax15(h=h, w=w, y=y) -> Tensor:
            return linear_entmax_loss(h, w, y, 1.5)

        def dense(h=h, w=w, y=y) -> Tensor:
            return F.cross_entropy(F.linear(h, w).float(), y)

        yield shape, "ours top-k 64", top_k, inputs
        yield shape, "ours entmax 1.5", entmax15, inputs
        yield shape, "F.linear + F.cross_entropy", dense, inputs
        if hasattr(F, "linear_cross_entropy"):

            def chunked(h=h, w=w, y=y) -> Tensor:
                return F.linear_cross_entropy(h, w, y)

            yield shape, "F.linear_cross_entropy", chunked, inputs
        liger = _optional("liger_kernel.transformers")
        if liger:
            function = liger.LigerFusedLinearCrossEntropyLoss()
            yield shape, "liger", lambda f=function, h=h, w=w, y=y: f(w, h, y), inputs


def _maps() -> Iterator[Timed]:
    peers = _optional("adasplash")
    for rows, length in ((65536, 256), (8192, 2048), (512, 32000), (16, 1_000_000)):
        x = torch.randn(rows, length, device="cuda").requires_grad_()
        alpha = torch.tensor(1.3, device="cuda", requires_grad=True)
        shape = f"map, {rows} x {length}, fp32"
        yield shape, "ours 1.5", lambda x=x: entmax(x, 1.5), (x,)
        yield shape, "ours learned", lambda x=x, a=alpha: entmax(x, a), (x, alpha)
        yield shape, "torch.softmax", lambda x=x: x.softmax(-1), (x,)
        if peers:
            yield shape, "adasplash entmax15", lambda x=x: peers.triton_entmax15(x), (x,)


def _optional(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        return None
