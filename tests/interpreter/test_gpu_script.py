"""The script that checks kernels on a GPU starts, and passes at tiny sizes in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_gpu_script_passes_in_the_interpreter(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), str(tmp_path)],
        env={**os.environ, "SMOKE": "1", "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == []
    assert "0 checks failed" in done.stdout
