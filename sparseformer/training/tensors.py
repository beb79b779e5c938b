"""Named tensors to and from safetensors files, with tied tensors stored once."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sparseformer.errors import CheckpointError
from sparseformer.training.atomic import sync_file

_MAX_HEADER_BYTES = 8 << 20
_MAX_NAMES_SHOWN = 5


class TensorSet(NamedTuple):
    """Tensors by name; `tied` maps the other names of a tensor to the one that it has here."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]

    def expanded(self) -> dict[str, Tensor]:
        """Return the tensors under all of their names."""
        return self.tensors | {alias: self.tensors[name] for alias, name in self.tied.items()}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones under each of their names."""
    tensors = dict(module.state_dict())
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}, but a state_dict needs tensors.")
    return tensors


def find_ties(tensors: Mapping[str, Tensor]) -> TensorSet:
    """Keep each tensor under its first name, and note the other names of the same memory."""
    first: dict[object, str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        name_of_same = first.setdefault(_identity(tensor), name)
        if name_of_same == name:
            kept[name] = tensor
        else:
            tied[name] = name_of_same
    return TensorSet(kept, tied)


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity."""
    return next((name for name, t in tensors.items() if not bool(t.isfinite().all())), None)


def byte_count(tensors: Mapping[str, Tensor]) -> int:
    """Return an upper bound of a file's size: the values, and 256 bytes of header per tensor."""
    return sum(t.nbytes + 256 + len(name) for name, t in tensors.items()) + 4096


def write_tensors(path: Path, content: TensorSet) -> None:
    """Write a safetensors file and return once it is on the disk.

    Raises:
        OSError, SafetensorError: the disk is full or can't be written.
    """
    seen: set[int] = set()
    stored = {name: _storable(t.detach(), seen) for name, t in content.tensors.items()}
    save_file(stored, path, metadata={"tied": json.dumps(content.tied)})
    sync_file(path)


def check_header(path: Path) -> str | None:
    """Say why a file can't be a safetensors file, or return None; reads the header only."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or header > min(_MAX_HEADER_BYTES, size - 8):
        return f"its header would have {header} bytes in a file of {size}"
    try:
        with safe_open(path, framework="pt", device="cpu"):
            return None
    except SafetensorError as error:
        return str(error)


def read_tensors(path: Path) -> TensorSet:
    """Map a safetensors file into memory; the tensors are valid while the file is.

    Raises:
        CheckpointError: not a safetensors file, or with a damaged record of tied tensors.
    """
    reason = check_header(path)
    if reason is not None:
        raise CheckpointError(f"{path} isn't a safetensors file ({reason}).")
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tied = _parse_tied(path, (file.metadata() or {}).get("tied", "{}"))
    if not set(tied.values()) <= set(tensors):
        raise CheckpointError(f"{path} ties {tied}, but these tensors aren't in it.")
    return TensorSet(tensors, tied)


def check_match(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise one sentence that names missing, unexpected and differing tensors, or non-finite ones.

    Args:
        path: the file, for the message.
        found: what the file holds.
        wanted: what the model or the optimiser holds.
    """
    differing = [
        f"{name} ({_form(found[name])} in the file, {_form(wanted[name])} in the model)"
        for name in wanted
        if name in found and _form(found[name]) != _form(wanted[name])
    ]
    problems = {
        "is missing": [name for name in wanted if name not in found],
        "holds unexpectedly": [name for name in found if name not in wanted],
        "differs in": differing,
    }
    told = [f"{verb} {listed(names)}" for verb, names in problems.items() if names]
    if told:
        raise CheckpointError(
            f"{path} doesn't fit the model: it {', it '.join(told)}; use the configuration that it "
            "was saved with, or another run name."
        )
    check_finite(path, found)


def check_finite(path: Path, found: Mapping[str, Tensor]) -> None:
    """Raise when a tensor of a file holds NaN or infinity."""
    name = first_nonfinite(found)
    if name is not None:
        raise CheckpointError(
            f"{path}: {name} isn't finite; move this checkpoint away to use the one before it."
        )


def check_ties(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, str]) -> None:
    """Raise when two names share one tensor of the model, but have different values in the file."""
    for alias, name in wanted.items():
        if not torch.equal(found[alias], found[name]):
            raise CheckpointError(
                f"{path}: {alias} and {name} differ, but are one tensor of the model; "
                "set model.tie_embeddings to false."
            )


def listed(names: Iterable[str]) -> str:
    """Join names for a message, the first few of them."""
    every = list(names)
    rest = len(every) - _MAX_NAMES_SHOWN
    return ", ".join(every[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _identity(tensor: Tensor) -> object:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _storable(tensor: Tensor, seen: set[int]) -> Tensor:
    """Return a contiguous CPU tensor that overlaps no other one."""
    address = tensor.untyped_storage().data_ptr()
    overlaps = address != 0 and address in seen
    seen.add(address)
    return tensor.cpu().contiguous().clone() if overlaps else tensor.cpu().contiguous()


def _parse_tied(path: Path, text: str) -> dict[str, str]:
    try:
        tied = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged record of tied tensors.") from error
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise CheckpointError(f"{path} has a damaged record of tied tensors.")
    return tied


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
