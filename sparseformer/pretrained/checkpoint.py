"""A published checkpoint, read from its files and built as our model."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from sparseformer.config import AttnName
from sparseformer.data import Tokenizer
from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.nn import AttentionChoice, Seq2SeqTransformer
from sparseformer.nn.attention_map import is_alpha
from sparseformer.pretrained.families import FAMILIES
from sparseformer.pretrained.files import read_weights, tokenizer_path
from sparseformer.pretrained.settings import PretrainedSettings, read_settings
from sparseformer.pretrained.weights import Layout, to_ours


@dataclass(frozen=True, kw_only=True)
class PretrainedCheckpoint(PretrainedSettings):
    """A published checkpoint; `build` makes the model."""

    weights: dict[str, Tensor] = field(repr=False)
    """By the names of Seq2SeqTransformer's state_dict, fp32."""
    unused: tuple[str, ...]
    """Tensors of the files that no model reads: copies of the embedding, tables we compute."""

    def build(
        self, attn: AttnName | AttentionChoice | None = None, alpha: float | None = None
    ) -> Seq2SeqTransformer:
        """Return the model with its weights, in training mode as every new module.

        With softmax its logits are those of transformers. A learned alpha starts as stored, else
        at `alpha`: near 1 the model starts as its checkpoint's own softmax.

        Args:
            attn: The map of all attentions, or one for each of the three; unset, as stored, which
                is softmax for a published checkpoint.
            alpha: entmax: the alpha; entmax_adaptive: where the heads start; unset, as stored, and
                1.05 for a published checkpoint.
        """
        model = self.new_model(attn, alpha)
        self.load_into(model, with_alphas=alpha is None)
        return model

    def load_into(self, model: Seq2SeqTransformer, *, with_alphas: bool = True) -> None:
        """Copy the weights into a model of this shape, whose attention may be another.

        Learned alphas that the checkpoint lacks keep their values, and with_alphas=False all do.
        """
        own = {name: value for name, value in model.state_dict().items() if is_alpha(name)}
        stored = {
            name: value
            for name, value in self.weights.items()
            if not is_alpha(name) or (with_alphas and name in own)
        }
        model.load_state_dict(own | stored)


def read_pretrained(source: str | Path, *, revision: str | None = None) -> PretrainedCheckpoint:
    """Read a published checkpoint; build the model with its `build`.

    Args:
        source: A folder with config.json and model.safetensors (or shards and their index), or a
            name on the Hugging Face hub.
        revision: A branch, tag or commit of the hub.

    Raises:
        CheckpointError: A file is missing or damaged, of an unknown family, or its tensors don't
            fit; the message names them.
    """
    settings = read_settings(source, revision=revision)
    layout = layout_of(settings)
    weights = to_ours(read_weights(settings.folder, settings.source), layout, str(source))
    model = dataclasses.replace(settings.model, tie_embeddings=weights.is_tied)
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    fields |= {"model": model, "weights": weights.tensors, "unused": weights.unused}
    return PretrainedCheckpoint(**fields)


def layout_of(settings: PretrainedSettings) -> Layout:
    """Return what the files of a checkpoint with these settings have to hold."""
    names = FAMILIES[settings.family].names(settings.model)
    tie: bool | None = settings.model.tie_embeddings
    if settings.family in ("t5", "mt5"):
        # transformers 5 writes `true` for untied models of these families too.
        says_untied = settings.config.values.get("tie_word_embeddings") is False
        tie = False if says_untied else None
    return Layout(
        names,
        settings.model,
        settings.conventions,
        settings.vocab_size,
        settings.attention,
        tie,
    )


def load_pretrained(
    source: str | Path,
    *,
    attn: AttnName | AttentionChoice | None = None,
    alpha: float | None = None,
    revision: str | None = None,
) -> tuple[Seq2SeqTransformer, Tokenizer]:
    """Load a published checkpoint and its tokenizer.

    Args:
        source: A folder, or a name on the Hugging Face hub.
        attn: As for `PretrainedCheckpoint.build`.
        alpha: As for `PretrainedCheckpoint.build`.
        revision: A branch, tag or commit of the hub.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        CheckpointError: As for `read_pretrained`; or the tokenizer is missing, damaged, or doesn't
            fit the model.
    """
    checkpoint = read_pretrained(source, revision=revision)
    tokenizer = load_tokenizer(checkpoint)
    return checkpoint.build(attn, alpha).eval(), tokenizer


def load_tokenizer(settings: PretrainedSettings) -> Tokenizer:
    """Load the tokenizer.json of a checkpoint, and check that it is the model's.

    Raises:
        CheckpointError: It is missing or damaged, has more tokens than the embedding has rows, or
            another padding or EOS than config.json.
    """
    path = tokenizer_path(settings.folder, settings.source)
    try:
        tokenizer = Tokenizer.load(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if tokenizer.vocab_size > settings.vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.vocab_size} tokens, but the embedding has only "
            f"{settings.vocab_size} rows; it belongs to another model."
        )
    for role in ("pad_id", "eos_id"):
        ours, theirs = getattr(tokenizer, role), getattr(settings, role)
        if ours != theirs:
            raise CheckpointError(
                f"{path} has the {role} {ours}, but {settings.config.path} says {theirs}; it "
                "belongs to another model."
            )
    return tokenizer
