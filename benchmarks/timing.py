"""What the benchmarks share: turn-taking timing, peak memory of tensors, and tables."""

import argparse
import datetime
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Tensor]


class Case(NamedTuple):
    """One operation, its peers by name, and the tensors whose gradients are computed."""

    name: str
    ours: Call
    peers: dict[str, Call]
    inputs: tuple[Tensor, ...]


class Timing(NamedTuple):
    """Milliseconds of forward + backward: the median, and half the range of the middle half."""

    median: float
    spread: float

    def __str__(self) -> str:
        """Show both, such as 12.3 +- 0.4."""
        return f"{self.median:.1f} +- {self.spread:.1f}"


def options(description: str | None) -> argparse.Namespace:
    """Read --repeats, --threads, --only and --json, and set the threads and the seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    return chosen


def header(threads: int, packages: Sequence[str]) -> str:
    """Say when, where and with which versions the figures were measured."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    machine = platform.processor() or platform.machine()
    return f"{datetime.date.today()}, {machine}, {threads} thread(s), {versions}"


def measure(case: Case, repeats: int) -> dict[str, Timing]:
    """Time all calls in turns, after one unmeasured turn, so that a busy moment hits all alike."""
    calls = {"ours": case.ours, **case.peers}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call().sum().backward()
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - started))
            for tensor in case.inputs:
                tensor.grad = None
    return {name: _timing(found) for name, found in times.items()}


def _timing(times: list[float]) -> Timing:
    if len(times) < 2:
        return Timing(times[0], 0.0)
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median, (high - low) / 2)


def run(cases: Iterator[Case], chosen: argparse.Namespace) -> list[dict[str, object]]:
    """Print one line per case and peer, and return the figures."""
    print("| operation, shape | ours ms | peer | peer ms | peer / ours |\n|---|---|---|---|---|")
    records: list[dict[str, object]] = []
    for case in cases:
        if chosen.only not in case.name:
            continue
        times = measure(case, chosen.repeats)
        for peer in case.peers:
            ratio = times[peer].median / times["ours"].median
            line = f"| {case.name} | {times['ours']} | {peer} | {times[peer]} | {ratio:.2f} |"
            print(line, flush=True)
            records.append(
                {
                    "name": case.name,
                    "peer": peer,
                    "ours_ms": times["ours"].median,
                    "peer_ms": times[peer].median,
                    "ratio": ratio,
                }
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(records, indent=1))
    return records


def tensor_peak(call: Callable[[], object], kept_bytes: int) -> float:
    """Return the MiB of tensors that a call has at its peak beyond what it leaves.

    Args:
        call: what is measured.
        kept_bytes: what stays allocated after the call, such as gradients.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return (max(itertools.accumulate(changes)) - kept_bytes) / 2**20
