"""The blocks of docs/huggingface.md run, and the values that they show are right."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SHOWN = re.compile(r"^(?P<expression>\S.*?)  # (?P<value>\[[-\d., ]+\]|\d+)", flags=re.MULTILINE)


def test_the_page_has_its_blocks() -> None:
    assert len(BLOCKS) == 3
    assert sum(len(SHOWN.findall(block)) for block in BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["swap", "save", "train"])
def test_a_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block, names)
    for shown in SHOWN.finditer(block):
        assert eval(shown["expression"], names) == pytest.approx(eval(shown["value"]))


@pytest.mark.parametrize("name", ["alphas", "from_pretrained", "parameter_groups"])
def test_the_page_shows_what_the_package_offers(name: str) -> None:
    from sparseformer.integrations import transformers

    assert name in transformers.__all__
    assert all(f"{public}" in PAGE for public in transformers.__all__)
