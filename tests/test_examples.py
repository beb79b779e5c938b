"""The examples run and find what they claim, and the blocks of docs/maps_and_losses.md are true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/maps_and_losses.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SHOWN = re.compile(r"^(?P<expression>\S.*?)  # \[(?P<values>[-\d., ]+)\]$", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def multilabel() -> dict[str, list[float]]:
    """Return the numbers of the printed table by the name of the model."""
    script = ROOT / "examples/multilabel.py"
    printed = subprocess.run(
        [sys.executable, str(script), "--train", "150", "--test", "100"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    rows = [line.split() for line in printed.splitlines()[2:]]
    return {name: [float(value) for value in values] for name, *values in rows}


def test_multilabel_compares_three_losses(multilabel: dict[str, list[float]]) -> None:
    assert list(multilabel) == ["softmax", "1.5-entmax", "sparsemax"]
    assert all(len(values) == 6 for values in multilabel.values())


def test_multilabel_finds_zeros_and_labels(multilabel: dict[str, list[float]]) -> None:
    _, _, dense, _, _, _ = multilabel["softmax"]
    error, _, labels, f1_above_0, f1, _ = multilabel["sparsemax"]
    assert dense == 10.0
    assert 2.0 < labels < 7.0
    assert f1_above_0 > 0.6
    assert f1 > 0.8
    assert error < 0.5 * multilabel["softmax"][0]


def test_the_page_has_its_blocks() -> None:
    assert len(BLOCKS) == 3
    assert sum(len(SHOWN.findall(block)) for block in BLOCKS) == 11


@pytest.mark.parametrize("block", BLOCKS, ids=["maps", "losses", "labels"])
def test_the_values_shown_on_the_page_are_computed(block: str) -> None:
    names: dict[str, object] = {}
    exec(block, names)
    for shown in SHOWN.finditer(block):
        found = eval(shown["expression"], names)
        values = found.tolist() if isinstance(found, torch.Tensor) else found
        expected = [float(value) for value in shown["values"].split(",")]
        assert values == pytest.approx(expected, abs=6e-5), shown["expression"]
