"""Run every check in lanes, print each lane's time, and fail when one of them fails."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
LANES: dict[str, list[list[str]]] = {
    "style": [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
    ],
    "reference": [[*PYTEST, "tests/functional", "tests/nn"]],
    "rooms": [
        [
            *PYTEST,
            "tests",
            "--ignore=tests/functional",
            "--ignore=tests/nn",
            "--ignore=tests/end_to_end",
        ]
    ],
    "end-to-end": [[*PYTEST, "tests/end_to_end"]],
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
    codes = [subprocess.run(command, cwd=ROOT).returncode for command in LANES[name]]
    return not any(codes), time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
