"""What the README shows is true: its Python blocks run, its tables name every choice."""

import re
from pathlib import Path

import pytest

from sparseformer.config import ATTN_NAMES, LOSS_NAMES, SourceName

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[1])
def test_python_block_runs(block: str) -> None:
    names: dict[str, object] = {}
    exec(block, names)
    assert "torch" in names


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("name", [*ATTN_NAMES, *LOSS_NAMES, *SourceName.__args__])
def test_every_choice_is_in_a_table(name: str) -> None:
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    assert any(f"`{name}`" in row for row in rows)


def test_the_printed_probabilities_are_right() -> None:
    import torch

    from sparseformer.functional import entmax

    found = re.search(r"# \[([\d., ]+)\]", README)
    assert found is not None
    printed = [float(value) for value in found[1].split(",")]
    probs = entmax(torch.tensor([1.0, 0.5, 0.0, -1.0]), alpha=1.5)
    assert probs.tolist() == pytest.approx(printed, abs=5e-5)
