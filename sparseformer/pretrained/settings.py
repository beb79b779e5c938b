"""What the JSON files of a published checkpoint say of it."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from sparseformer.config import ATTN_NAMES, AttnName, ModelConfig
from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.nn import AttentionChoice, Seq2SeqTransformer
from sparseformer.nn.blocks import Conventions
from sparseformer.pretrained.families import FAMILIES, Architecture, Family
from sparseformer.pretrained.files import CONFIG, GENERATION, locate
from sparseformer.pretrained.generation import GenerationDefaults, read_generation
from sparseformer.pretrained.settings_file import SettingsFile, read_settings_file

OWN_KEY = "sparseformer"
"""A key of config.json, and the start of model_type, where a checkpoint has sparse attention."""

START_ALPHA = 1.05
"""Where the heads of a published checkpoint start: near its own softmax, with room to learn."""


@dataclass(frozen=True, kw_only=True)
class PretrainedSettings:
    """What the JSON files of a published checkpoint say; it holds no weights."""

    source: str
    """The folder or the hub name that it was read from."""
    folder: Path
    """Where its files are."""
    family: str
    """t5 (also 1.1 and Flan), mt5, bart, marian, mbart or pegasus."""
    model: ModelConfig
    """Sizes and parts, dropout too."""
    conventions: Conventions
    vocab_size: int
    """Rows of the embedding; often more than the tokenizer has tokens."""
    pad_id: int
    start_id: int
    """First input of the decoder: padding for T5, EOS for BART, a language for some of mBART."""
    eos_id: int
    generation: GenerationDefaults
    attention: AttentionChoice
    """softmax, or what `save_pretrained` wrote."""
    config: SettingsFile = field(repr=False)
    generation_config: SettingsFile | None = field(repr=False)

    def new_model(
        self, attn: AttnName | AttentionChoice | None = None, alpha: float | None = None
    ) -> Seq2SeqTransformer:
        """Return a model of this shape with random weights.

        Args:
            attn: The map of all attentions, or one for each of the three; unset, as stored.
            alpha: entmax: the alpha; entmax_adaptive: where every head starts; unset, as stored,
                and 1.05 for a published checkpoint.
        """
        model = self.model if alpha is None else dataclasses.replace(self.model, alpha=alpha)
        return Seq2SeqTransformer(
            model,
            self.vocab_size,
            attn=self.attention if attn is None else attn,
            pad_id=self.pad_id,
            conventions=self.conventions,
        )


def read_settings(source: str | Path, *, revision: str | None = None) -> PretrainedSettings:
    """Read config.json and generation_config.json of a checkpoint, without its weights.

    Args:
        source: A folder, or a name on the Hugging Face hub.
        revision: A branch, tag or commit of the hub.

    Raises:
        CheckpointError: A file is missing or damaged, or of a family that isn't known.
    """
    folder = locate(source, revision)
    config = read_settings_file(folder / CONFIG)
    family_name = config.text("model_type", "").removeprefix(f"{OWN_KEY}-")
    if family_name not in FAMILIES:
        raise config.refusal("model_type", f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[family_name]
    attention, own = _read_attention(config)
    model, conventions = _read_architecture(config, family, own)
    has_generation = (folder / GENERATION).is_file()
    generation = read_settings_file(folder / GENERATION) if has_generation else None
    vocab_size = config.integer("vocab_size", minimum=1)
    ids = _control_ids(config, generation, family)
    for role, value in ids._asdict().items():
        if value >= vocab_size:
            raise CheckpointError(
                f"{config.path}: the {role} is {value}, but vocab_size is {vocab_size}."
            )
    return PretrainedSettings(
        source=str(source),
        folder=folder,
        family=family_name,
        model=model,
        conventions=conventions,
        vocab_size=vocab_size,
        **ids._asdict(),
        generation=_generation(config, generation, family, ids.eos_id),
        attention=attention,
        config=config,
        generation_config=generation,
    )


class _ControlIds(NamedTuple):
    pad_id: int
    start_id: int
    eos_id: int


def _control_ids(
    config: SettingsFile, generation: SettingsFile | None, family: Family
) -> _ControlIds:
    pad_id, eos_id = config.token("pad_token_id"), config.token("eos_token_id")
    pad_id = family.pad_id if pad_id is None else pad_id
    eos_id = family.eos_id if eos_id is None else eos_id
    if pad_id is None:
        raise config.refusal("pad_token_id", "a token id")
    for settings in (generation, config):
        start_id = None if settings is None else settings.token("decoder_start_token_id")
        if start_id is not None:
            return _ControlIds(pad_id, start_id, eos_id)
    usual = {"pad": pad_id, "eos": eos_id, "bos": config.token("bos_token_id") or 0}
    return _ControlIds(pad_id, usual[family.start], eos_id)


def _generation(
    config: SettingsFile, generation: SettingsFile | None, family: Family, eos_id: int
) -> GenerationDefaults:
    if generation is not None:
        return read_generation(generation, None)
    return read_generation(config, eos_id if family.forces_eos else None)


def _read_architecture(config: SettingsFile, family: Family, own: dict[str, Any]) -> Architecture:
    """Read the model's shape, with what its stored attention is parametrised by."""
    try:
        model, conventions = family.read(config)
        return Architecture(dataclasses.replace(model, **own), conventions)
    except ConfigError as error:
        raise CheckpointError(f"{config.path}: {error}") from error


def _read_attention(config: SettingsFile) -> tuple[AttentionChoice, dict[str, Any]]:
    """Return the stored attention, and the fields of ModelConfig that belong to it."""
    stored = config.values.get(OWN_KEY)
    if stored is None:
        return AttentionChoice("softmax", "softmax", "softmax"), {"alpha": START_ALPHA}
    if not isinstance(stored, dict):
        raise config.refusal(OWN_KEY, "an object")
    own = SettingsFile(config.path, stored)
    names = [own.text(where) for where in AttentionChoice._fields]
    for where, name in zip(AttentionChoice._fields, names, strict=True):
        if name not in ATTN_NAMES:
            raise own.refusal(where, f"one of {', '.join(ATTN_NAMES)}")
    fields = {"alpha": own.number("alpha"), "attn_k": own.integer("attn_k", minimum=1)}
    return AttentionChoice(*cast(list[AttnName], names)), fields | {"attn_p": own.number("attn_p")}
