"""Small random checkpoints of transformers, made once for all tests of this folder."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)


class Saved(NamedTuple):
    """A checkpoint's folder, which a test must not change, and the model of transformers."""

    folder: Path
    theirs: Any


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a name in `published_models.PUBLISHED` to the checkpoint."""
    from published_models import publish

    made: dict[str, Saved] = {}

    def make(name: str) -> Saved:
        if name not in made:
            folder = tmp_path_factory.mktemp("published")
            made[name] = Saved(folder, publish(name, folder))
        return made[name]

    return make
