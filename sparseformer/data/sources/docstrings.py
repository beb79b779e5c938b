"""Summaries without a download: docstring body -> first paragraph, from installed Python code."""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sparseformer.config import DataConfig
from sparseformer.data.cache import cache_folder, make_folder, read_lines, write_lines
from sparseformer.data.pairs import Pair, PairDataset, RejectionLog, make_dataset, split_by_group

SHORTEST_BODY = 20
SHORTEST_HEAD, LONGEST_HEAD = 3, 30
_INSTALLED = ("site-packages", "dist-packages")
_TESTS = ("test", "tests")
# Part of the cache's key: raise it when the same files give other pairs.
_FORMAT = 1


class _Code(NamedTuple):
    group: str  # the top-level package or module
    path: Path


def load_docstrings(config: DataConfig) -> PairDataset:
    """Load docstrings of the standard library and of installed packages, split by top-level name.

    A pair is a docstring's text after its first paragraph (20 words or more) and that paragraph (3
    to 30 words), both with single spaces. Files are parsed, never imported; tests are left out; no
    body occurs twice. The first call parses every file, a minute or two for 200 MB of code; later
    ones take the pairs from the cache as long as no file changed.

    Raises:
        DataError: If the cache folder can't be made, or its file is damaged.
        CheckpointError: If the cache file can't be written.
    """
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    return build_docstrings(roots, make_folder(cache_folder(config) / "docstrings"))


def build_docstrings(roots: Iterable[Path], cache: Path) -> PairDataset:
    """Collect the docstrings below some folders, or take them from the cache.

    Args:
        roots: Folders whose children are the groups that a split keeps together.
        cache: An existing folder; the file's name in it is a hash of all code that was read.
    """
    files = [code for root in roots for code in _python_files(root)]
    kept = cache / f"{_key(files)}.jsonl"
    if not kept.exists():
        write_lines(kept, _collect(files))
    unreadable, *rows = read_lines(kept)
    log = RejectionLog()
    for place in unreadable:
        log.add("not valid Python", place)
    group = {src: name for name, src, _ in rows}
    pairs = (Pair(src, tgt) for _, src, tgt in rows)
    splits = split_by_group(pairs, lambda pair: group[pair.src])
    return make_dataset("docstrings", splits, rejected=log.summary(), baseline="lead_1")


def docstring_pair(docstring: str) -> Pair | None:
    """Turn a docstring into body -> first paragraph, or None where one has no fair length."""
    head, _, body = docstring.strip().partition("\n\n")
    head_words, body_words = head.split(), body.split()
    if not SHORTEST_HEAD <= len(head_words) <= LONGEST_HEAD or len(body_words) < SHORTEST_BODY:
        return None
    return Pair(" ".join(body_words), " ".join(head_words))


def _python_files(root: Path) -> Iterator[_Code]:
    """Yield the code below a folder by path, without the installed packages that may lie in it."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] not in _INSTALLED and not _is_test(parts):
            yield _Code(parts[0].removesuffix(".py"), path)


def _is_test(parts: tuple[str, ...]) -> bool:
    name = parts[-1]
    named_test = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
    return named_test or not set(_TESTS).isdisjoint(parts[:-1])


def _key(files: Iterable[_Code]) -> str:
    digest = hashlib.sha256(f"format {_FORMAT}\n".encode())
    for group, path in files:
        digest.update(f"{group} {hashlib.sha256(_read(path)).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # Not Python, so that it is counted with the files that can't be parsed.
        return b"\0"


def _collect(files: Sequence[_Code]) -> list[list[str]]:
    """Return the paths that can't be parsed, then [group, body, head] of every distinct body."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    unreadable: list[str] = []
    found: dict[str, list[str]] = {}
    shown = track(
        files, "parsing", console=console, transient=True, disable=not console.is_terminal
    )
    for group, path in shown:
        tree = _parse(path)
        if tree is None:
            unreadable.append(str(path))
            continue
        for pair in _pairs_in(tree):
            found.setdefault(pair.src, [group, *pair])
    return [unreadable, *found.values()]


def _parse(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        # Other people's invalid escapes are no concern of the user.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(_read(path))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _pairs_in(tree: ast.Module) -> Iterator[Pair]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            pair = docstring_pair(docstring) if docstring else None
            if pair is not None and _is_unicode(pair):
                yield pair


def _is_unicode(pair: Pair) -> bool:
    # "\ud800" in a docstring is a lone surrogate, which no file can hold.
    try:
        "".join(pair).encode()
    except UnicodeEncodeError:
        return False
    return True
