"""Checkpoints to fine-tune and runs that were fine-tuned, made once for all tests here."""

from collections.abc import Callable

import pytest
from published import SPARSE, Start

from sparseformer.cli import main


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:
    """Return a function from a family to its checkpoint and pairs, made once."""
    made: dict[str, Start] = {}

    def make(family: str) -> Start:
        if family not in made:
            made[family] = Start(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


@pytest.fixture(params=["t5", "bart", "mbart"], scope="session")
def tuned(request: pytest.FixtureRequest, start: Callable[[str], Start]) -> Start:
    """A run of each family with sparse attention and a sparse loss."""
    family = start(request.param)
    if not (family.runs / "run").exists():
        assert main(family.arguments("run", *SPARSE)) == 0
    return family
