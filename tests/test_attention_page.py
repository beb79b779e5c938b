"""What docs/attention.md shows is true: its Python blocks run, its links lead somewhere."""

import re
from pathlib import Path

from doc_blocks import run_code_blocks

PAGE = Path(__file__).parents[1] / "docs" / "attention.md"


def test_python_blocks_run() -> None:
    names = run_code_blocks(PAGE)
    assert "compiled" in names


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([\w./]+)\)", PAGE.read_text())
    assert len(links) >= 3
    assert all((PAGE.parent / link).is_file() for link in links)


def test_the_scripts_it_names_are_there() -> None:
    scripts = re.findall(r"`python (benchmarks/\w+\.py)`", PAGE.read_text())
    assert scripts
    assert all((PAGE.parents[1] / script).is_file() for script in scripts)
