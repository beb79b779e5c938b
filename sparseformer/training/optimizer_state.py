"""An optimiser's state as tensors keyed by parameter name, without its hyperparameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparseformer.errors import CheckpointError
from sparseformer.training.tensors import check_finite, listed

Scalar = bool | int | float | str | None


class OptimizerState(NamedTuple):
    """What an optimiser has learned: `PARAMETER:KEY` tensors, and scalars by parameter and key.

    `parameters` are the names in the order of the groups; one that never had a gradient has
    neither tensors nor scalars.
    """

    parameters: list[str]
    tensors: dict[str, Tensor]
    scalars: dict[str, dict[str, Scalar]]


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Collect the state of every parameter of an optimiser by its name in the model."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Scalar]] = {}
    named = _named_parameters(optimizer, model)
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}:{key}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                scalars.setdefault(name, {})[key] = value
            else:
                raise ValueError(
                    f"The optimiser keeps {key} of {name} as {type(value).__name__}; a checkpoint "
                    "holds tensors and numbers only."
                )
    return OptimizerState(list(named), tensors, scalars)


def check_optimizer_state(
    path: Path, saved: OptimizerState, optimizer: Optimizer, model: nn.Module
) -> None:
    """Raise one sentence that names what doesn't fit this optimiser, or isn't finite."""
    named = _named_parameters(optimizer, model)
    missing = [name for name in named if name not in saved.parameters]
    unexpected = [name for name in saved.parameters if name not in named]
    told = [f"it lacks {listed(missing)}"] if missing else []
    told += [f"it holds unexpectedly {listed(unexpected)}"] if unexpected else []
    wrong = [key for key, tensor in saved.tensors.items() if not _fits(key, tensor, named)]
    told += [f"it has the wrong shape in {listed(wrong)}"] if wrong else []
    if told:
        raise CheckpointError(
            f"{path} doesn't fit the optimiser: {', '.join(told)}; use the configuration that it "
            "was saved with, or another run name."
        )
    check_finite(path, saved.tensors)


@torch.no_grad()
def load_optimizer_state(saved: OptimizerState, optimizer: Optimizer, model: nn.Module) -> None:
    """Give a checked state to an optimiser; the groups keep their own hyperparameters."""
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in saved.tensors.items():
        name, _, kind = key.rpartition(":")
        # the file is mapped into memory, and the optimiser writes into its state
        entries.setdefault(name, {})[kind] = tensor.clone()
    for name, values in saved.scalars.items():
        entries.setdefault(name, {}).update(values)
    order = _named_parameters(optimizer, model)
    state = {index: entries[name] for index, name in enumerate(order) if name in entries}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def parse_optimizer_record(path: Path, record: Any) -> tuple[list[str], dict[str, Any]]:
    """Return parameter names and scalars from state.json's part about the optimiser."""
    fields: Mapping[str, Any] = record if isinstance(record, dict) else {}
    parameters, scalars = fields.get("parameters"), fields.get("scalars")
    if not isinstance(parameters, list) or not isinstance(scalars, dict):
        raise CheckpointError(f"{path} has no record of the optimiser's parameters and scalars.")
    if not all(isinstance(values, dict) for values in scalars.values()):
        raise CheckpointError(f"{path} has a damaged record of the optimiser's scalars.")
    return parameters, scalars


def _named_parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the optimiser's parameters in its order, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise ValueError(
                f"The optimiser has a parameter of shape {list(parameter.shape)} that isn't in the "
                "model; pass a module that holds every trained parameter."
            )
    return {names[id(parameter)]: parameter for parameter in parameters}


def _fits(key: str, tensor: Tensor, named: Mapping[str, nn.Parameter]) -> bool:
    parameter = named.get(key.rpartition(":")[0])
    return parameter is None or tensor.dim() == 0 or tensor.shape == parameter.shape
