"""Run the Python blocks of a page, so that what it shows stays true."""

import re
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def code_blocks(path: Path) -> list[tuple[int, str]]:
    """Return the Python blocks of a Markdown page in order, each with the line it starts on."""
    text = path.read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found[1]) for found in BLOCK.finditer(text)]


def run_code_blocks(path: Path, namespace: dict[str, object] | None = None) -> dict[str, object]:
    """Run the Python blocks of a Markdown page one after another, in one namespace.

    An error's traceback names the page and the line in it.

    Args:
        path: the page.
        namespace: names that the page's first block may already use; else none.

    Returns:
        The namespace after the last block.

    Raises:
        ValueError: the page has no Python block.
    """
    blocks = code_blocks(path)
    if not blocks:
        raise ValueError(f"{path} has no ```python block.")
    names: dict[str, object] = {"__name__": "__main__"} if namespace is None else namespace
    for line, source in blocks:
        # Empty lines before the block keep the line numbers of the page.
        exec(compile("\n" * (line - 1) + source, str(path), "exec"), names)
    return names
