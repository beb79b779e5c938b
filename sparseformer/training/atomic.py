"""Files that are either the old or the new version after a crash, and JSON that can't hurt."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from sparseformer.errors import CheckpointError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class UnreadableJSONError(CheckpointError):
    """A file that should hold one JSON object and doesn't."""


def write_atomic(path: Path | str, text: str) -> None:
    """Replace a file by UTF-8 text: readers and crashes see the old version or the new one.

    Args:
        path: the file; its folder exists.
        text: the whole new content.

    Raises:
        CheckpointError: the disk is full or can't be written; the old version stays.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, text)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, len(text.encode()), error) from error


def write_synced(path: Path, text: str) -> None:
    """Write a UTF-8 file and return once it is on the disk."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Return once a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return once a folder's entries (new names, renames) are on the disk."""
    sync_file(path)


def disk_error(path: Path, needed: int, error: Exception) -> CheckpointError:
    """Describe a failed write: the path, the bytes it needed, and what to do."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(
        f"Writing {path} needs {needed} bytes and failed ({reason}); free space there or choose "
        "another runs_dir, then run the same command again."
    )


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file of limited size and depth.

    Args:
        path: the file.
        max_bytes: the largest file to read.

    Raises:
        UnreadableJSONError: missing, too large, too deeply nested, not UTF-8, or no JSON object.
    """
    try:
        if not path.is_file():
            raise UnreadableJSONError(f"{path.name} is missing")
        size = path.stat().st_size
        if size > max_bytes:
            raise UnreadableJSONError(f"{path.name} has {size} bytes, more than {max_bytes}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnreadableJSONError(f"{path.name} is missing") from error
    except RecursionError as error:
        raise UnreadableJSONError(f"{path.name} is nested too deeply") from error
    except ValueError as error:
        raise UnreadableJSONError(f"{path.name} isn't JSON") from error
    if not isinstance(value, dict):
        raise UnreadableJSONError(f"{path.name} doesn't hold a JSON object")
    return value
