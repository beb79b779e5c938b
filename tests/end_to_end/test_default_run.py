"""The README's first command, whole: real data, within minutes, better than the suffix rules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_default_command_inflects_english(tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "--attn", "entmax_adaptive", "--loss", "sparse_topk"]
    result = subprocess.run(
        [*command, "--runs-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(
        (tmp_path / "inflection-entmax_adaptive-sparse_topk/results.json").read_text()
    )
    assert results["test"]["exact_match"] >= 85
    assert results["test"]["exact_match"] > results["baseline"]["exact_match"]
    heads = [v for layers in results["alpha"].values() for layer in layers for v in layer]
    assert max(heads) - min(heads) > 0.2
    for word in ("exact_match", "baseline", "Alpha of every head", "prediction"):
        assert word in result.stdout
