"""The sizes, parts and conventions of each family of published models."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from sparseformer.config import Activation, ModelConfig
from sparseformer.errors import CheckpointError
from sparseformer.nn.blocks import Conventions
from sparseformer.pretrained.names import Names, bart_names, t5_names
from sparseformer.pretrained.settings_file import SettingsFile

# T5's relative positions have no longest sequence; no run passes this one.
_NO_LIMIT = 1 << 20
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "swish",
    "swish": "swish",
    "gated-relu": "gated_relu",
    "gated-gelu": "gated_gelu_tanh",
    "gated-gelu_new": "gated_gelu_tanh",
    "gated-silu": "gated_swish",
}


class Architecture(NamedTuple):
    """What config.json says of a model."""

    model: ModelConfig
    conventions: Conventions


class Family(NamedTuple):
    """How one family is read, and what the format fills in where a file is silent."""

    read: Callable[[SettingsFile], Architecture]
    names: Callable[[ModelConfig], Names]
    pad_id: int | None
    eos_id: int
    start: Literal["pad", "eos", "bos"]
    """The first input of the decoder, unless decoder_start_token_id names another."""
    forces_eos: bool
    """Whether an output that reaches the longest length ends with EOS."""


def _activation(settings: SettingsFile, key: str, default: str) -> Activation:
    name = settings.text(key, default)
    if name not in _ACTIVATIONS:
        raise settings.refusal(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_t5(settings: SettingsFile) -> Architecture:
    """Read T5 1.0, 1.1 and Flan: the flag of tied embeddings also decides the output's factor."""
    return _t5(settings, "relu", is_scaled=scales_output(settings))


def _read_mt5(settings: SettingsFile) -> Architecture:
    return _t5(settings, "gated-gelu", is_scaled=False)


def scales_output(settings: SettingsFile) -> bool:
    """Say whether T5 multiplies its last hidden states by d_model ** -0.5.

    Version 1.0 does and has tied embeddings; 1.1 says `tie_word_embeddings: false`, for which
    transformers 5 writes `scale_decoder_outputs: false`.
    """
    is_tied = settings.flag("tie_word_embeddings", True)
    return settings.flag("scale_decoder_outputs", is_tied)


def _t5(settings: SettingsFile, activation: str, *, is_scaled: bool) -> Architecture:
    d_model = settings.integer("d_model", minimum=1)
    dropout = settings.number("dropout_rate", 0.1)
    num_layers = settings.integer("num_layers", minimum=1)
    model = ModelConfig(
        d_model=d_model,
        num_heads=settings.integer("num_heads", minimum=1),
        head_dim=settings.integer("d_kv", minimum=1),
        ffn_dim=settings.integer("d_ff", minimum=1),
        encoder_layers=num_layers,
        decoder_layers=settings.integer("num_decoder_layers", num_layers, minimum=1),
        dropout=dropout,
        attention_dropout=dropout,
        activation=_activation(settings, "feed_forward_proj", activation),
        norm="rms_norm",
        positions="t5",
        max_positions=_NO_LIMIT,
        tie_embeddings=is_scaled,
    )
    conventions = Conventions(
        bias=False,
        score_scale=1.0,
        norm_eps=settings.number("layer_norm_epsilon", 1e-6),
        embedding_scale=1.0,
        position_buckets=settings.integer("relative_attention_num_buckets", 32),
        position_max_distance=settings.integer("relative_attention_max_distance", 128),
        output_scale=d_model**-0.5 if is_scaled else 1.0,
    )
    return Architecture(model, conventions)


def _same(settings: SettingsFile, key: str, *, minimum: int = 1) -> int:
    """Return a size that encoder and decoder share, as our model has one of each."""
    sizes = [settings.integer(f"{side}_{key}", minimum=minimum) for side in ("encoder", "decoder")]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{settings.path}: encoder_{key} {sizes[0]} and decoder_{key} {sizes[1]} differ, but "
            "this model has one size for both."
        )
    return sizes[0]


def _bart_model(settings: SettingsFile, model: ModelConfig) -> Architecture:
    """Fill in what BART, mBART, Marian and Pegasus have in common."""
    d_model, num_heads = settings.integer("d_model", minimum=1), _same(settings, "attention_heads")
    if d_model % num_heads:
        raise settings.refusal("encoder_attention_heads", f"a divisor of d_model = {d_model}")
    is_scaled = settings.flag("scale_embedding", False)
    sizes = ModelConfig(
        d_model=d_model,
        num_heads=num_heads,
        ffn_dim=_same(settings, "ffn_dim"),
        encoder_layers=settings.integer("encoder_layers", minimum=1),
        decoder_layers=settings.integer("decoder_layers", minimum=1),
        dropout=settings.number("dropout", 0.1),
        attention_dropout=settings.number("attention_dropout", 0.0),
        activation=_activation(settings, "activation_function", "gelu"),
        norm_position=model.norm_position,
        positions=model.positions,
        max_positions=settings.integer("max_position_embeddings", minimum=1),
        tie_embeddings=settings.flag("tie_word_embeddings", True),
    )
    conventions = Conventions(
        embedding_scale=math.sqrt(d_model) if is_scaled else 1.0,
        embedding_norm=model.positions == "learned",
        position_offset=2 if model.positions == "learned" else 0,
        logits_bias=True,
    )
    return Architecture(sizes, conventions)


def _read_bart(settings: SettingsFile) -> Architecture:
    return _bart_model(settings, ModelConfig(norm_position="post", positions="learned"))


def _read_mbart(settings: SettingsFile) -> Architecture:
    return _bart_model(settings, ModelConfig(norm_position="pre", positions="learned"))


def _read_pegasus(settings: SettingsFile) -> Architecture:
    return _bart_model(settings, ModelConfig(norm_position="pre", positions="sinusoidal"))


def _read_marian(settings: SettingsFile) -> Architecture:
    if not settings.flag("share_encoder_decoder_embeddings", True):
        raise CheckpointError(
            f"{settings.path}: share_encoder_decoder_embeddings is false, but this model has one "
            "vocabulary and one embedding for both sides."
        )
    return _bart_model(settings, ModelConfig(norm_position="post", positions="sinusoidal"))


def _names_with_norm(model: ModelConfig) -> Names:
    return bart_names(model, embedding_norm=True)


def _names_without_norm(model: ModelConfig) -> Names:
    return bart_names(model, embedding_norm=False)


FAMILIES: dict[str, Family] = {
    "t5": Family(_read_t5, t5_names, 0, 1, "pad", False),
    "mt5": Family(_read_mt5, t5_names, 0, 1, "pad", False),
    "bart": Family(_read_bart, _names_with_norm, 1, 2, "eos", True),
    "mbart": Family(_read_mbart, _names_with_norm, 1, 2, "bos", True),
    "marian": Family(_read_marian, _names_without_norm, None, 0, "pad", True),
    "pegasus": Family(_read_pegasus, _names_without_norm, 0, 1, "pad", True),
}
