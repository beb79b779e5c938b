"""Time forward + backward of our operations beside their peers, in one run.

    python benchmarks/cpu_operations.py

Peers come from the package index: `entmax` (extra `dev`) and torch itself. Each figure is the
median of repeats that take turns, so that a busy moment hits all alike; the ratio is peer / ours,
above 1 where ours is quicker.
"""

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import entmax as peer
import torch
from torch import Tensor
from torch.nn import functional as F

from sparseformer.functional import (
    entmax,
    entmax15,
    entmax_attention,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparsemax,
)

Call = Callable[[], Tensor]


class Case(NamedTuple):
    """One operation, its peer, and the tensors whose gradients are computed."""

    name: str
    ours: Call
    theirs: Call
    inputs: tuple[Tensor, ...]


def main() -> None:
    """Print one table row per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{options.threads} thread(s), torch {torch.__version__}, entmax {version('entmax')}"
    )
    print("| operation, shape | ours ms | peer ms | peer / ours |\n|---|---|---|---|")
    for case in [*map_cases(), *attention_cases(), *loss_cases()]:
        ours, theirs = measure(case, options.repeats)
        print(f"| {case.name} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |", flush=True)


def measure(case: Case, repeats: int) -> tuple[float, float]:
    """Return the medians in milliseconds, after one unmeasured call of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for call, found in zip((case.ours, case.theirs), times, strict=True):
            started = time.perf_counter()
            call().sum().backward()
            if repeat:
                found.append(1e3 * (time.perf_counter() - started))
            for tensor in case.inputs:
                tensor.grad = None
    return statistics.median(times[0]), statistics.median(times[1])


def map_cases() -> list[Case]:
    """Rows of standard normal scores, and a weighted sum so that no gradient is trivial."""
    cases = []
    for rows, length in ((2048, 256), (256, 2048), (16, 32_000)):
        x = torch.randn(rows, length, requires_grad=True)
        weight = torch.randn(rows, length)
        shape = f"{rows} x {length}"
        cases += [
            Case(
                f"entmax15 vs entmax.entmax15, {shape}",
                lambda x=x, w=weight: entmax15(x) * w,
                lambda x=x, w=weight: peer.entmax15(x) * w,
                (x,),
            ),
            Case(
                f"sparsemax vs entmax.sparsemax, {shape}",
                lambda x=x, w=weight: sparsemax(x) * w,
                lambda x=x, w=weight: peer.sparsemax(x) * w,
                (x,),
            ),
            Case(
                f"entmax 1.3 vs entmax.entmax_bisect, {shape}",
                lambda x=x, w=weight: entmax(x, 1.3) * w,
                lambda x=x, w=weight: peer.entmax_bisect(x, 1.3) * w,
                (x,),
            ),
        ]
    return cases


def attention_cases() -> list[Case]:
    """Training shapes: many short sequences, and one longer one."""
    cases = []
    for batch, heads, length, width in ((256, 4, 20, 32), (2, 8, 512, 64)):
        q, k, v = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
        alpha = torch.linspace(1.2, 1.8, heads).requires_grad_()
        shape = f"[{batch}, {heads}, {length}, {width}]"
        scale = width**-0.5

        def dense(mapping: Callable[[Tensor], Tensor], q=q, k=k, v=v, scale=scale) -> Tensor:
            return mapping(q @ k.mT * scale) @ v

        cases += [
            Case(
                f"attention alpha 1 vs F.scaled_dot_product_attention, {shape}",
                lambda q=q, k=k, v=v: entmax_attention(q, k, v, 1.0),
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
                (q, k, v),
            ),
            Case(
                f"attention alpha 1.5 vs dense entmax.entmax15, {shape}",
                lambda q=q, k=k, v=v: entmax_attention(q, k, v, 1.5),
                lambda f=dense: f(peer.entmax15),
                (q, k, v),
            ),
            Case(
                f"attention learned alpha vs dense entmax.entmax_bisect, {shape}",
                lambda q=q, k=k, v=v, a=alpha: entmax_attention(q, k, v, a),
                lambda f=dense, a=alpha: f(lambda s: peer.entmax_bisect(s, a[:, None, None])),
                (q, k, v, alpha),
            ),
        ]
    return cases


def loss_cases() -> list[Case]:
    """1,024 tokens against large vocabularies; logits of standard deviation 1."""
    cases = []
    for vocab in (8_000, 50_304):
        h = torch.randn(1024, 512, requires_grad=True)
        w = (torch.randn(vocab, 512) * 512**-0.5).requires_grad_()
        y = torch.randint(vocab, (1024,))
        shape = f"1024 x 512, V = {vocab:,}"

        def full(h=h, w=w, y=y) -> Tensor:
            return F.cross_entropy(h @ w.T, y)

        cases += [
            Case(
                f"linear_sparse_cross_entropy k 64 vs F.linear + F.cross_entropy, {shape}",
                lambda h=h, w=w, y=y: linear_sparse_cross_entropy(h, w, y, k=64),
                full,
                (h, w),
            ),
            Case(
                f"linear_entmax_loss 1.5 vs F.linear + F.cross_entropy, {shape}",
                lambda h=h, w=w, y=y: linear_entmax_loss(h, w, y, 1.5),
                full,
                (h, w),
            ),
        ]
    return cases


if __name__ == "__main__":
    main()
