"""Save a model in the format of the published checkpoint that it came from."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparseformer.data import Tokenizer
from sparseformer.errors import CheckpointError
from sparseformer.nn import AttentionChoice, Seq2SeqTransformer
from sparseformer.pretrained.checkpoint import layout_of
from sparseformer.pretrained.files import CONFIG, GENERATION, TOKENIZER, TOKENIZER_FILES, WEIGHTS
from sparseformer.pretrained.settings import (
    OWN_KEY,
    START_ALPHA,
    PretrainedSettings,
    read_settings,
)
from sparseformer.pretrained.weights import expected_shapes, to_theirs


def save_pretrained(
    model: Seq2SeqTransformer,
    folder: str | Path,
    like: PretrainedSettings | str | Path,
    *,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Save a model as its checkpoint was: config.json, model.safetensors and the tokenizer's files.

    With softmax everywhere, transformers loads the folder, and its logits are the model's. With any
    other attention, transformers would compute softmax without a word; so config.json gets the key
    `sparseformer` and the model_type `sparseformer-t5` (or -bart ...), which transformers refuses
    and `load_pretrained` reads, with the learned alphas.

    Args:
        model: From `build`, trained or not.
        folder: Where to write; made if need be. Files of these names are replaced.
        like: The checkpoint that the model came from, or a folder with its JSON files.
        tokenizer: Written as tokenizer.json; unset, the tokenizer's files of `like` are copied.

    Returns:
        The folder.

    Raises:
        CheckpointError: The model isn't of the shape of `like`, or the disk refuses a file.
    """
    folder = Path(folder)
    settings = like if isinstance(like, PretrainedSettings) else read_settings(like)
    tensors = _tensors(model, settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_settings(settings, folder, _config(model, settings), tokenizer)
        temporary = folder / f".{WEIGHTS}.tmp-{os.getpid()}"
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Can't write to {folder} ({error}); choose another.") from error
    return folder


def save_settings(settings: PretrainedSettings, folder: str | Path) -> Path:
    """Write all of a checkpoint's files but the weights: enough for `save_pretrained`'s `like`.

    Raises:
        CheckpointError: The disk refuses a file.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_settings(settings, folder, dict(settings.config.values), None)
    except OSError as error:
        raise CheckpointError(f"Can't write to {folder} ({error}); choose another.") from error
    return folder


def attention_of(model: Seq2SeqTransformer) -> AttentionChoice:
    """Return the maps of a model's three attentions.

    Raises:
        CheckpointError: The layers of one attention have several maps.
    """
    found = {}
    for where, layers in model.attention_layers().items():
        names = {layer.attn for layer in layers}
        if len(names) > 1:
            raise CheckpointError(f"The layers of {where} have the maps {sorted(names)}, not one.")
        found[where] = names.pop()
    return AttentionChoice(**found)


def _tensors(model: Seq2SeqTransformer, settings: PretrainedSettings) -> dict[str, Tensor]:
    is_tied = model.output is None
    layout = layout_of(settings)._replace(tie=is_tied, attention=attention_of(model))
    own, shapes = model.state_dict(), expected_shapes(layout, is_tied=is_tied)
    names = sorted(own.keys() | shapes.keys())
    odd = [n for n in names if n not in own or own[n].shape != shapes.get(n)]
    if odd:
        raise CheckpointError(
            f"The model isn't of the shape of {settings.source}: {odd[0]} differs."
        )
    return to_theirs(own, layout)


def _config(model: Seq2SeqTransformer, settings: PretrainedSettings) -> dict[str, Any]:
    config = {key: value for key, value in settings.config.values.items() if key != OWN_KEY}
    config["model_type"] = settings.family
    config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    choice = attention_of(model)
    if set(choice) == {"softmax"}:
        return config
    config["model_type"] = f"{OWN_KEY}-{settings.family}"
    return config | {OWN_KEY: choice._asdict() | _map_settings(model)}


def _map_settings(model: Seq2SeqTransformer) -> dict[str, float]:
    """Return what the maps of a model are parametrised by, as the fields of ModelConfig."""
    layers = [layer for group in model.attention_layers().values() for layer in group]
    fixed = {layer.fixed_alpha for layer in layers if layer.attn == "entmax"}
    if len(fixed) > 1:
        raise CheckpointError(f"The layers have several fixed alphas {fixed}, not one.")
    alpha = next((alpha for alpha in fixed if alpha is not None), START_ALPHA)
    return {"alpha": alpha, "attn_k": layers[0].k, "attn_p": layers[0].p}


def _copy_settings(
    settings: PretrainedSettings, folder: Path, config: dict[str, Any], tokenizer: Tokenizer | None
) -> None:
    _write_json(folder / CONFIG, config)
    if settings.generation_config is not None:
        _write_json(folder / GENERATION, dict(settings.generation_config.values))
    names = [name for name in TOKENIZER_FILES if tokenizer is None or name != TOKENIZER]
    for name in names:
        source = settings.folder / name
        if source.is_file() and source.resolve() != (folder / name).resolve():
            (folder / name).write_bytes(source.read_bytes())
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
