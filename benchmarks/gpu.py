"""Check every kernel against float64, repeat it bit for bit, and time it beside its peers.

Run by benchmarks/gpu.sh, which describes the call. Checks come first and timings last, each printed
as it is known; timings stop when the time is up, and all figures are written to results.json.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gpu_checks
import gpu_peers
import torch
from gpu_checks import Check

SECONDS = 500
REPEATS = 50
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Row(NamedTuple):
    """One timed call of one implementation."""

    shape: str
    name: str
    forward_ms: float
    total_ms: float
    peak_mib: float


def main() -> int:
    """Run checks, then timings; return 1 if a check failed."""
    output, started = Path(sys.argv[1]), time.monotonic()
    if not INTERPRETED and not torch.cuda.is_available():
        print("No GPU was found; SMOKE=1 benchmarks/gpu.sh runs tiny sizes on the CPU.")
        return 2
    device = torch.device("cpu" if INTERPRETED else "cuda")
    print(gpu_peers.versions(device), flush=True)
    failures = [failure for check in gpu_checks.checks(device) if (failure := _run(check))]
    repeats = 2 if INTERPRETED else REPEATS
    repeated = list(gpu_checks.repeated(device, repeats))
    failures += [f for check in repeated[:: 5 if INTERPRETED else 1] if (f := _run(check))]
    rows = [] if INTERPRETED else list(_time(started))
    results = {
        "versions": gpu_peers.versions(device),
        "failures": failures,
        "timings": [row._asdict() for row in rows],
    }
    (output / "results.json").write_text(json.dumps(results, indent=1))
    print(f"\n{len(failures)} checks failed in {time.monotonic() - started:.0f} s")
    _print_table(rows)
    return 1 if failures else 0


def _run(check: Check) -> str | None:
    """Print how a check ended, and return what went wrong."""
    started = time.perf_counter()
    try:
        check.run()
    # A kernel can fail in any way, and the checks after it must still run.
    except Exception as error:
        message = f"{check.name}: {type(error).__name__}: {str(error)[:300]}"
        print(f"FAILED {message}", flush=True)
        return message
    print(f"ok     {check.name} ({time.perf_counter() - started:.1f} s)", flush=True)
    return None


def _time(started: float) -> Iterator[Row]:
    for shape, name, call, inputs in gpu_peers.timed_calls():
        if time.monotonic() - started > SECONDS:
            print(f"time is up before {shape}, {name}")
            return
        try:
            row = Row(shape, name, *_measure(call, inputs))
        # A peer may refuse a shape, or not fit in memory.
        except Exception as error:
            print(f"{shape}, {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        print(f"{row.shape}, {row.name}: {row.forward_ms:.3f} / {row.total_ms:.3f} ms", flush=True)
        yield row


def _measure(call: Callable[[], Any], inputs: tuple[Any, ...]) -> tuple[float, float, float]:
    """Return the medians of forward and of forward + backward, ms, and the peak memory, MiB."""
    grad = torch.randn_like(call())

    def both() -> None:
        torch.autograd.grad(call(), inputs, grad)

    with torch.no_grad():
        forward = _median(call)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = _median(both)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return forward, total, peak


def _median(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def _print_table(rows: list[Row]) -> None:
    if not rows:
        return
    print("\n| shape | implementation | forward ms | forward + backward ms | peak MiB |")
    print("|---|---|---|---|---|")
    for row in rows:
        times = f"{row.forward_ms:.3f} | {row.total_ms:.3f} | {row.peak_mib:.0f}"
        print(f"| {row.shape} | {row.name} | {times} |")


if __name__ == "__main__":
    sys.exit(main())
