"""MANIFEST.json: what a complete checkpoint folder holds, so that damage is found before use."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sparseformer.errors import CheckpointError
from sparseformer.training.atomic import (
    UnreadableJSONError,
    read_json_object,
    sync_folder,
    write_synced,
)
from sparseformer.training.folders import step_of
from sparseformer.training.tensors import check_header

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
MAX_STATE_BYTES = 16 << 20
_MAX_MANIFEST_BYTES = 1 << 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CorruptCheckpointError(CheckpointError):
    """A checkpoint folder that is incomplete or damaged; the message says how."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 in hex of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json."""

    format_version: int
    step: int
    world_size: int
    files: dict[str, FileEntry]


def write_manifest(folder: Path, step: int, world_size: int) -> None:
    """Describe the files of a complete folder, and return once all of it is on the disk."""
    files = {
        name: FileEntry((folder / name).stat().st_size, sha256(folder / name)) for name in FILES
    }
    manifest = Manifest(FORMAT_VERSION, step, world_size, files)
    write_synced(folder / MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")
    sync_folder(folder)


def verify(folder: Path) -> Manifest:
    """Check names, sizes and hashes of a checkpoint, sizes first.

    Args:
        folder: `checkpoints/step-0000100`.

    Raises:
        CorruptCheckpointError: something is missing or differs.
        CheckpointError: a newer format version, or a file that can't be read.
    """
    try:
        manifest = _read_manifest(folder)
        for name, entry in manifest.files.items():
            _verify_size(folder / name, entry)
        for name, entry in manifest.files.items():
            if sha256(folder / name) != entry.sha256:
                raise CorruptCheckpointError(f"the sha256 of {name} isn't the manifest's")
        for name in (MODEL, OPTIMIZER):
            reason = check_header(folder / name)
            if reason is not None:
                raise CorruptCheckpointError(f"{name} isn't a safetensors file ({reason})")
    except UnreadableJSONError as error:
        raise CorruptCheckpointError(str(error)) from error
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{error.filename} is missing") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Checkpoint {folder} can't be read: {error}.") from error
    return manifest


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(folder: Path) -> Manifest:
    content = read_json_object(folder / MANIFEST, _MAX_MANIFEST_BYTES)
    version = content.get("format_version")
    if _is_count(version) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint {folder} has format version {version}, but this sparseformer reads "
            f"version {FORMAT_VERSION}; upgrade sparseformer, or choose another run name."
        )
    if version != FORMAT_VERSION:
        raise CorruptCheckpointError(f"{MANIFEST} has format version {version!r}")
    step, world_size, files = (content.get(key) for key in ("step", "world_size", "files"))
    if not (_is_count(step) and _is_count(world_size) and isinstance(files, dict)):
        raise CorruptCheckpointError(f"{MANIFEST} lacks step, world_size or files")
    if step != step_of(folder):
        raise CorruptCheckpointError(f"{MANIFEST} is of step {step}")
    if set(files) != set(FILES):
        raise CorruptCheckpointError(
            f"{MANIFEST} lists {sorted(files)} in place of {sorted(FILES)}"
        )
    entries = {name: _entry(name, files[name]) for name in FILES}
    return Manifest(FORMAT_VERSION, step, world_size, entries)


def _entry(name: str, value: Any) -> FileEntry:
    fields = value if isinstance(value, dict) else {}
    size, digest = fields.get("size"), fields.get("sha256")
    if not (_is_count(size) and isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise CorruptCheckpointError(f"{MANIFEST} has no size and sha256 of {name}")
    return FileEntry(size, digest)


def _verify_size(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise CorruptCheckpointError(f"{path.name} is missing")
    size = path.stat().st_size
    if size != entry.size:
        raise CorruptCheckpointError(f"{path.name} has {size} bytes in place of {entry.size}")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0
