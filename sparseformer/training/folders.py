"""Checkpoint folders of a run: their names, their order, and how one appears and goes."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from sparseformer.errors import CheckpointError
from sparseformer.training.atomic import disk_error, sync_folder
from sparseformer.training.faults import fault_point
from sparseformer.training.runfolder import read_best

TEMPORARY = ".tmp-"
CORRUPT = "corrupt-"
_REPLACED = ".replaced-"
_STEP_NAME = re.compile(r"step-(\d{7,})")


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:07d}"


def step_of(path: Path) -> int | None:
    """Return the step that a folder is named for, or None when it isn't a checkpoint's name."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match and step_name(int(match[1])) == path.name else None


def prune_checkpoints(run_dir: Path | str, keep: int, best_step: int | None) -> None:
    """Delete all checkpoints but the newest ones and the best one; damaged ones are left alone.

    The step in best.json also stays: a run may be killed between a save and its new best.json.

    Args:
        run_dir: the run folder.
        keep: how many of the newest to keep, at least 1.
        best_step: a step to keep in any case.

    Raises:
        CheckpointError: a folder can't be deleted, or best.json is damaged.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, but it must be 1 or more.")
    fault_point("checkpoint-prune")
    best = read_best(run_dir)
    kept = {best_step, best.step if best is not None else None}
    for path in saved_steps(checkpoints_folder(run_dir))[:-keep]:
        if step_of(path) in kept:
            continue
        # renamed first, so that a half deleted folder is never taken for a checkpoint
        doomed = path.with_name(TEMPORARY + path.name)
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(f"{path} can't be deleted: {error}.") from error


def checkpoints_folder(run_dir: Path | str) -> Path:
    """Return the folder of all checkpoints of a run."""
    return Path(run_dir) / "checkpoints"


def saved_steps(folder: Path) -> list[Path]:
    """Return the checkpoint folders by step."""
    named = [(step_of(path), path) for path in folder.iterdir()]
    return [path for _, path in sorted((step, path) for step, path in named if step is not None)]


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name; a crash leaves the new one or the one that it replaces."""
    replaced = folder.with_name(_REPLACED + folder.name)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def clean_temporaries(folder: Path) -> None:
    """Delete what a killed process left, and bring back what it was about to replace."""
    for path in folder.glob(f"{_REPLACED}*"):
        original = path.with_name(path.name.removeprefix(_REPLACED))
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def require_free_space(folder: Path, needed: int) -> None:
    """Raise OSError before a save that the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"only {free} bytes are free")


@contextmanager
def disk_errors(folder: Path, needed: int, temporary: Path) -> Iterator[None]:
    """Turn a failed save into a CheckpointError, and delete what it had written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise disk_error(folder, needed, error) from error


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint to a name that is free."""
    target = path.with_name(CORRUPT + path.name)
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{CORRUPT}{path.name}.{number}")
    try:
        path.rename(target)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged and can't be renamed: {error}.") from error
    return target
