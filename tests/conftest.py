"""Settings that every test shares."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread is quicker for tests of this size, and repeats bit for bit anywhere."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _private_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keep built data sets out of the user's cache, and share them between tests."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def copy_tiny(tmp_path: Path) -> Iterator[list[str]]:
    """Arguments of `sparseformer train` for the copy task, in a run folder of this test."""
    return ["--config", str(ROOT / "configs/copy_tiny.toml"), "--runs-dir", str(tmp_path / "runs")]
