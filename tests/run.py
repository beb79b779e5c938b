"""Run every check in lanes, print each lane's time, and fail when one of them fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
# Tests use one thread each, so two processes keep two cores busy.
IN_TWO = [*PYTEST, "-n", "2"]
LANE_FOLDERS = (
    "functional", "nn", "interpreter", "compile_gate", "oldest_triton", "end_to_end",
)  # fmt: skip
DEFAULT_RUN = "tests/end_to_end/test_default_run.py"
OLDEST_TRITON = "triton==3.6.0"
OLDEST_FOLDER = ROOT / "build" / "oldest_triton"
LANES: dict[str, list[list[str]]] = {
    "style": [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
    ],
    "reference": [[*IN_TWO, "tests/functional", "tests/nn"]],
    "interpreter": [[*IN_TWO, "tests/interpreter"]],
    "compile gate": [[*IN_TWO, "tests/compile_gate"]],
    "oldest triton": [
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
            *("--target", str(OLDEST_FOLDER), OLDEST_TRITON),
        ],
        [*IN_TWO, "tests/oldest_triton"],
    ],
    "rooms": [[*IN_TWO, "tests", *(f"--ignore=tests/{name}" for name in LANE_FOLDERS)]],
    # The default run has a time limit, on both cores.
    "end-to-end": [
        [*PYTEST, DEFAULT_RUN],
        [*IN_TWO, "--dist", "loadfile", "tests/end_to_end", f"--ignore={DEFAULT_RUN}"],
    ],
}
# The interpreter lane runs Triton's kernels on the CPU; the others must not.
ENVIRONMENT = {
    "interpreter": {"TRITON_INTERPRET": "1"},
    "oldest triton": {"PYTHONPATH": str(OLDEST_FOLDER)},
}


def main(names: list[str]) -> int:
    """Run the named lanes, or all of them."""
    unknown = set(names) - set(LANES)
    if unknown:
        print(f"There is no lane {', '.join(sorted(unknown))}; the lanes are {', '.join(LANES)}.")
        return 2
    outcomes = {name: _run(name) for name in names or LANES}
    print()
    for name, (passed, seconds) in outcomes.items():
        print(f"{name:12} {'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    return 0 if all(passed for passed, _ in outcomes.values()) else 1


def _run(name: str) -> tuple[bool, float]:
    print(f"\n== {name}", flush=True)
    started = time.perf_counter()
    environment = {**os.environ, **ENVIRONMENT.get(name, {})}
    codes = [
        subprocess.run(command, cwd=ROOT, env=environment).returncode for command in LANES[name]
    ]
    return not any(codes), time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
