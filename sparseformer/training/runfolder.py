"""The run folder besides its checkpoints: the lock, best.json and what changed since the save."""

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from sparseformer.config import Config
from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.training.atomic import JSON, UnreadableJSONError, read_json_object, write_atomic

LOCK = ".lock"
BEST = "best.json"
_MAX_BEST_BYTES = 1 << 16


class RunLock:
    """A held lock on a run folder; also ends when the process does, however it does."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Release the lock; the file stays, since deleting it would let two runs in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def lock_run(run_dir: Path | str) -> RunLock:
    """Keep a second run out of a run folder, from now until `close` or the end of the process.

    Args:
        run_dir: the folder; created when it is missing.

    Returns:
        The lock, also a context manager.

    Raises:
        ConfigError: another process holds the lock (its pid is named), or the folder can't be
            written.
    """
    path = Path(run_dir) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"The run folder {run_dir} can't be written ({error.strerror}); choose another "
            "with --runs-dir or --name."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 20).decode().strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"The run folder {run_dir} is in use by the process with pid {holder}; wait for it, "
            "stop it, or choose another with --name."
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return RunLock(descriptor)


class Best(NamedTuple):
    """The content of best.json: the step whose validation figure is the best so far."""

    step: int
    metric: str
    value: float


def write_best(run_dir: Path | str, step: int, metric: str, value: float) -> None:
    """Say in best.json which checkpoint is the best one.

    Args:
        run_dir: the run folder.
        step: the step of the checkpoint.
        metric: name of the validation figure, such as `loss`.
        value: the figure; one that isn't finite is written as the string "NaN" or "Infinity".

    Raises:
        CheckpointError: the disk is full or can't be written; the old file stays.
    """
    number = value if math.isfinite(value) else json.dumps(value)
    text = json.dumps({"step": step, "metric": metric, "value": number})
    write_atomic(Path(run_dir) / BEST, text + "\n")


def read_best(run_dir: Path | str) -> Best | None:
    """Read best.json, or return None when no checkpoint was chosen yet.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = Path(run_dir) / BEST
    if not path.exists():
        return None
    try:
        content = read_json_object(path, _MAX_BEST_BYTES)
        return Best(int(content["step"]), str(content["metric"]), float(content["value"]))
    except (UnreadableJSONError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); delete it to use the newest checkpoint."
        ) from error


def differences(
    old_config: Config | Mapping[str, JSON], new_config: Config | Mapping[str, JSON]
) -> list[str]:
    """List the settings that differ between a saved and a current resolved config.

    Args:
        old_config: the config that a checkpoint was saved with, as a Config or as nested mappings.
        new_config: the config of this run.

    Returns:
        One line per setting, such as `optim.lr: 0.002 in the checkpoint, 0.001 now`.
    """
    old, new = _flatten(_as_mapping(old_config)), _flatten(_as_mapping(new_config))
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {_shown(old, key)} in the checkpoint, {_shown(new, key)} now"
        for key in keys
        if _shown(old, key) != _shown(new, key)
    ]


def _as_mapping(config: Config | Mapping[str, JSON]) -> Mapping[str, Any]:
    return dataclasses.asdict(config) if isinstance(config, Config) else config


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "absent"
