"""Checkpoints that survive a crash at any moment, and that are checked before they are used."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import nn
from torch.optim import Optimizer

from sparseformer.errors import CheckpointError, NumericError
from sparseformer.training.atomic import (
    JSON,
    UnreadableJSONError,
    read_json_object,
    write_atomic,
    write_synced,
)
from sparseformer.training.faults import fault_point
from sparseformer.training.folders import (
    CORRUPT,
    TEMPORARY,
    checkpoints_folder,
    clean_temporaries,
    disk_errors,
    prune_checkpoints,
    put_in_place,
    quarantine,
    require_free_space,
    saved_steps,
    step_name,
    step_of,
)
from sparseformer.training.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    MODEL,
    OPTIMIZER,
    STATE,
    CorruptCheckpointError,
    verify,
    write_manifest,
)
from sparseformer.training.optimizer_state import (
    OptimizerState,
    check_optimizer_state,
    load_optimizer_state,
    optimizer_state,
    parse_optimizer_record,
)
from sparseformer.training.runfolder import (
    Best,
    RunLock,
    differences,
    lock_run,
    read_best,
    write_best,
)
from sparseformer.training.tensors import (
    TensorSet,
    byte_count,
    check_match,
    check_ties,
    find_ties,
    first_nonfinite,
    listed,
    named_tensors,
    read_tensors,
    write_tensors,
)

__all__ = [
    "JSON",
    "Best",
    "Checkpoint",
    "RunLock",
    "differences",
    "find_weights",
    "load_latest_checkpoint",
    "load_model_weights",
    "lock_run",
    "prune_checkpoints",
    "read_best",
    "read_checkpoint",
    "restore",
    "save_checkpoint",
    "write_atomic",
    "write_best",
]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder.

    Attributes:
        path: the folder.
        step: optimiser steps taken when it was saved.
        world_size: processes that trained together when it was saved.
        state: what the caller gave to save_checkpoint.
    """

    path: Path
    step: int
    world_size: int
    state: dict[str, Any]


class _Content(NamedTuple):
    """What the files of a checkpoint will hold."""

    weights: TensorSet
    optimizer: TensorSet
    state: str

    def byte_count(self) -> int:
        tensors = byte_count(self.weights.tensors) + byte_count(self.optimizer.tensors)
        return tensors + len(self.state.encode())


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, JSON],
) -> Path:
    """Save a step so that a crash at any moment leaves either the whole checkpoint or none.

    The files are written to a temporary folder and synced, MANIFEST.json last, and the folder gets
    its name by one rename. Saving a step again replaces its checkpoint.

    Args:
        run_dir: the run folder; its lock is held by this process.
        step: optimiser steps taken.
        model: holds every parameter of the optimiser; not wrapped for distributed training.
        optimizer: its state is saved by parameter name, and its hyperparameters are not.
        state: what else a resumed run needs; read back by json, so that tuples become lists.

    Returns:
        The folder `run_dir/checkpoints/step-0000100`.

    Raises:
        CheckpointError: the disk is full or can't be written; older checkpoints are intact.
        NumericError: a weight or a part of the optimiser's state is NaN or infinite.
        ValueError: a parameter of the optimiser isn't in the model, or a state isn't a tensor.
    """
    folder = checkpoints_folder(run_dir) / step_name(step)
    content = _collect(step, model, optimizer, state)
    temporary = folder.with_name(TEMPORARY + folder.name)
    with disk_errors(folder, content.byte_count(), temporary):
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean_temporaries(folder.parent)
        require_free_space(folder.parent, content.byte_count())
        temporary.mkdir()
        _write(temporary, step, content)
        fault_point("checkpoint-rename")
        put_in_place(temporary, folder)
    return folder


def load_latest_checkpoint(
    run_dir: Path | str,
    *,
    allow_fresh: bool = False,
    report: Callable[[str], object] = print,
) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run; damaged ones are renamed `corrupt-*`.

    Only the process that holds the run's lock may call this; see load_model_weights for others.

    Args:
        run_dir: the run folder.
        allow_fresh: return None in place of an error when all checkpoints are damaged.
        report: gets one line for every checkpoint that was skipped.

    Returns:
        The checkpoint, or None when the run has none.

    Raises:
        CheckpointError: checkpoints exist and none is intact, one has a newer format, or the
            folder can't be read.
    """
    folder = checkpoints_folder(run_dir)
    if not folder.is_dir():
        return None
    clean_temporaries(folder)
    for path in reversed(saved_steps(folder)):
        try:
            return read_checkpoint(path)
        except CorruptCheckpointError as error:
            report(f"Skipped {path}: {error}; it is now {quarantine(path).name}.")
    corrupt = sorted(folder.glob(f"{CORRUPT}*"))
    if corrupt and not allow_fresh:
        raise CheckpointError(
            f"No checkpoint in {folder} is intact (damaged: {listed(p.name for p in corrupt)}); "
            "mend one and give it its old name, or start from step 0 with --allow-fresh."
        )
    return None


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Verify a checkpoint folder, and read its state.

    Raises:
        CheckpointError: damaged, of a newer format, or unreadable.
    """
    path = Path(path)
    manifest = verify(path)
    try:
        state = read_json_object(path / STATE, MAX_STATE_BYTES).get("state")
    except UnreadableJSONError as error:
        raise CorruptCheckpointError(str(error)) from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{STATE} has no state")
    return Checkpoint(path, manifest.step, manifest.world_size, state)


@torch.no_grad()
def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    """Copy a checkpoint into a model and its optimiser; nothing is changed unless all of it fits.

    The values go into the model's own tensors, so that ties between them hold. Learning rates and
    all other hyperparameters stay those of the optimiser.

    Args:
        checkpoint: from load_latest_checkpoint.
        model: as it was given to save_checkpoint, with any values.
        optimizer: over the same parameters.

    Raises:
        CheckpointError: tensors are missing, unexpected, tied otherwise, of another shape or dtype,
            or not finite.
    """
    path = checkpoint.path
    wanted, found = named_tensors(model), read_tensors(path / MODEL)
    check_match(path / MODEL, found.expanded(), wanted)
    ties = find_ties(wanted).tied
    check_ties(path / MODEL, found.expanded(), ties)
    if found.tied != ties:
        raise CheckpointError(
            f"{path / MODEL} has the ties {found.tied}, but the model has {ties}; "
            "set model.tie_embeddings as it was."
        )
    saved = _read_optimizer(path)
    check_optimizer_state(path / OPTIMIZER, saved, optimizer, model)
    _copy(found.expanded(), wanted)
    load_optimizer_state(saved, optimizer, model)


@torch.no_grad()
def load_model_weights(
    path: Path | str,
    model: nn.Module,
    *,
    prefix: str = "",
    optional: Callable[[str], bool] | None = None,
) -> Checkpoint:
    """Copy only the weights of a checkpoint into a model, without changing the folder.

    Args:
        path: a run folder (its best checkpoint, else its newest) or a checkpoint folder.
        model: takes the values into its own tensors; an untied model takes tied values twice.
        prefix: what the file has before the model's names, when the model was saved as a part of
            another module; names without it are ignored.
        optional: says of a name, without prefix, that it may be in the model or the file only;
            such a tensor of the model keeps its value.

    Returns:
        The checkpoint that was used.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one that doesn't fit.
    """
    folder = find_weights(path)
    try:
        checkpoint = read_checkpoint(folder)
    except CorruptCheckpointError as error:
        raise CheckpointError(f"{folder} is damaged: {error}; choose another one.") from error
    file = read_tensors(folder / MODEL).expanded()
    found = {name.removeprefix(prefix): t for name, t in file.items() if name.startswith(prefix)}
    wanted = named_tensors(model)
    for name in found.keys() ^ wanted.keys():
        if optional is not None and optional(name):
            found.pop(name, None)
            wanted.pop(name, None)
    check_match(folder / MODEL, found, wanted)
    check_ties(folder / MODEL, found, find_ties(wanted).tied)
    _copy(found, wanted)
    return checkpoint


def find_weights(path: Path | str) -> Path:
    """Return the checkpoint folder that a path means.

    Args:
        path: a checkpoint folder, or a run folder: its best checkpoint, else its newest.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return path
    best = read_best(path)
    if best is not None:
        return checkpoints_folder(path) / step_name(best.step)
    steps = saved_steps(checkpoints_folder(path)) if checkpoints_folder(path).is_dir() else []
    if not steps:
        raise CheckpointError(
            f"{path} has no checkpoint; give a run folder or a checkpoint folder."
        )
    return steps[-1]


def _collect(
    step: int, model: nn.Module, optimizer: Optimizer, state: Mapping[str, JSON]
) -> _Content:
    weights = find_ties(named_tensors(model))
    moments = optimizer_state(optimizer, model)
    name = first_nonfinite(weights.tensors | moments.tensors)
    if name is not None:
        raise NumericError(
            f"{name} isn't finite at step {step}, so no checkpoint was written; go on from the one "
            "before with a lower optim.lr."
        )
    record = {"parameters": moments.parameters, "scalars": moments.scalars}
    # Python's JSON also keeps NaN and infinity, which a figure in the state may be
    text = json.dumps({"step": step, "optimizer": record, "state": state}, indent=2) + "\n"
    if len(text.encode()) > MAX_STATE_BYTES:
        raise ValueError(f"The state has {len(text)} characters, more than {MAX_STATE_BYTES}.")
    return _Content(weights, TensorSet(moments.tensors, {}), text)


def _write(folder: Path, step: int, content: _Content) -> None:
    write_tensors(folder / MODEL, content.weights)
    fault_point("checkpoint-file")
    write_tensors(folder / OPTIMIZER, content.optimizer)
    fault_point("checkpoint-file")
    write_synced(folder / STATE, content.state)
    fault_point("checkpoint-file")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    write_manifest(folder, step, torch.distributed.get_world_size() if distributed else 1)


def _read_optimizer(folder: Path) -> OptimizerState:
    content = read_json_object(folder / STATE, MAX_STATE_BYTES)
    parameters, scalars = parse_optimizer_record(folder / STATE, content.get("optimizer"))
    return OptimizerState(parameters, read_tensors(folder / OPTIMIZER).tensors, scalars)


def _copy(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        tensor.copy_(found[name])
