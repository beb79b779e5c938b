"""Find the files of a published checkpoint, and read its tensors from safetensors, never pickle."""

import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparseformer.errors import CheckpointError
from sparseformer.pretrained.settings_file import read_settings_file

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
# What transformers' own tokenizer classes read beside tokenizer.json.
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Fetched to tell Marian's checkpoints, which have no tokenizer.json, from incomplete ones.
_MARIAN_SOURCE = "source.spm"


def is_pretrained(folder: str | Path) -> bool:
    """Say whether a folder holds a published checkpoint: a config.json with a model_type."""
    try:
        settings = read_settings_file(Path(folder) / CONFIG)
    except CheckpointError:
        return False
    return isinstance(settings.values.get("model_type"), str)


def locate(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, fetched from the Hugging Face hub if need be.

    Args:
        source: A folder, or a name on the hub such as google/flan-t5-small.
        revision: A branch, tag or commit of the hub.

    Raises:
        CheckpointError: There is no such folder, or the hub doesn't give it.
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a folder, so it has no revision {revision!r}.")
        return folder
    if not _HUB_NAME.fullmatch(str(source)):
        raise CheckpointError(f"{source} is neither a folder nor a name on the Hugging Face hub.")
    return _download(str(source), revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [CONFIG, GENERATION, INDEX, "model*.safetensors", *TOKENIZER_FILES, _MARIAN_SOURCE]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise CheckpointError(
            f"{name} is no folder here, and the Hugging Face hub doesn't give it ({reason}); "
            "check the name and the network, or give the folder of a downloaded checkpoint."
        ) from error


def read_weights(folder: Path, source: str) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint, from one file or from the shards of an index.

    Args:
        folder: Where the files are.
        source: What the user called it, for messages.

    Raises:
        CheckpointError: A file is missing, truncated or no safetensors file, or the index and the
            shards disagree.
    """
    if (folder / WEIGHTS).is_file():
        return _read_file(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    raise CheckpointError(
        f"{source} has no {WEIGHTS} and no {INDEX}. If its weights are a pickle "
        "(pytorch_model.bin), which can run any code and isn't read, convert it, once you trust "
        f"it: {_with_transformers('AutoModelForSeq2SeqLM', source)}"
    )


def tokenizer_path(folder: Path, source: str) -> Path:
    """Return the tokenizer.json of a checkpoint.

    Raises:
        CheckpointError: There is none; the message says how to make one.
    """
    path = folder / TOKENIZER
    if path.is_file():
        return path
    if (folder / _MARIAN_SOURCE).exists():
        raise CheckpointError(
            f"{source} has no {TOKENIZER} but Marian's two SentencePiece models, one for each "
            "side, which no single tokenizer.json expresses; build the model with "
            "read_pretrained(...).build() and take the ids from transformers' MarianTokenizer, or "
            f"put a {TOKENIZER} with the same ids there."
        )
    raise CheckpointError(
        f"{source} has no {TOKENIZER}; make one: {_with_transformers('AutoTokenizer', source)}"
    )


def _with_transformers(loader: str, source: str) -> str:
    return (
        f'python -c "from transformers import {loader} as A; '
        f"A.from_pretrained('{source}').save_pretrained('NEW_FOLDER')\""
    )


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = read_settings_file(folder / INDEX)
    places = index.values.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise index.refusal("weight_map", "an object from tensor to file")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index.path} points to {name!r}, outside its folder.")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks the shard {name}, which its {INDEX} names.")
        tensors |= _read_file(folder / name)
    if tensors.keys() != places.keys():
        odd = sorted(tensors.keys() ^ places.keys())
        raise CheckpointError(f"{index.path} and its shards disagree about {listed(odd)}.")
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} isn't a whole safetensors file ({error}); copy or download it again."
        ) from error


def listed(names: list[str]) -> str:
    """Join names for a message, the first five of them."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
