"""Where built sources are kept, and files that are either whole or not there."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparseformer.config import DataConfig
from sparseformer.errors import CheckpointError, DataError


def cache_folder(config: DataConfig) -> Path:
    """Return data.cache_dir, else $XDG_CACHE_HOME/sparseformer, else ~/.cache/sparseformer."""
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparseformer"


def make_folder(path: Path) -> Path:
    """Create a folder with its parents.

    Raises:
        DataError: If the file system refuses it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"The folder {path} can't be made ({error.strerror}): set another data.cache_dir."
        ) from error
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through a temporary neighbour: a kill leaves the old file or the new one.

    Raises:
        CheckpointError: If the disk is full or refuses the file.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"Can't write {path}: {error.strerror or error}; free some space or choose another "
            "folder."
        ) from error
    finally:
        # What went wrong above matters more than a temporary file that stays.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_lines(path: Path, values: Iterable[object]) -> None:
    """Keep JSON values, one a line.

    Raises:
        CheckpointError: If the disk is full or refuses the file.
    """
    lines = (json.dumps(value, ensure_ascii=False) for value in values)
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def read_lines(path: Path) -> list[Any]:
    """Read what write_lines kept.

    Raises:
        DataError: If the file was changed by another hand.
    """
    try:
        return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    except ValueError as error:
        raise DataError(
            f"The cache file {path} is damaged: delete it to build it again."
        ) from error
