"""From the tensors of a published checkpoint to ours, and back."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.config import ModelConfig
from sparseformer.errors import CheckpointError
from sparseformer.nn import AttentionChoice, Seq2SeqTransformer
from sparseformer.nn.attention_map import is_alpha
from sparseformer.nn.blocks import Conventions
from sparseformer.nn.positions import SinusoidalPositions
from sparseformer.pretrained.files import listed
from sparseformer.pretrained.names import Names

ALPHA_PREFIX = "sparseformer."
"""Before our own names of learned alphas in a file; no family has such tensors."""

HEAD = "lm_head.weight"
_LOGITS_BIAS = "final_logits_bias"
# Stored by early versions of T5, and read by none.
_UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


class Weights(NamedTuple):
    """The tensors of a checkpoint by our names, and what became of the others."""

    tensors: dict[str, Tensor]
    is_tied: bool
    """Whether the output matrix is the embedding."""
    unused: tuple[str, ...]
    """Tensors of the files that nothing reads: copies, and tables that we compute."""


class Layout(NamedTuple):
    """What the files of a model have to hold."""

    names: Names
    model: ModelConfig
    conventions: Conventions
    vocab_size: int
    attention: AttentionChoice
    tie: bool | None
    """Whether the output matrix is the embedding; None: unless the files hold another one."""

    @property
    def prefix(self) -> str:
        """What the family's names start with."""
        (embedding,) = self.names["embedding.weight"]
        return embedding.removesuffix("shared.weight")

    def all_names(self, shapes: Mapping[str, object]) -> Names:
        """Add the output matrix and the learned alphas that a model of these shapes has."""
        alphas: Names = {name: (ALPHA_PREFIX + name,) for name in shapes if is_alpha(name)}
        head: Names = {"output.weight": (HEAD,)} if "output.weight" in shapes else {}
        return self.names | head | alphas

    def embedding_names(self) -> list[str]:
        """Name the one embedding and the copies of it that files of some versions hold."""
        kinds = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        return [f"{self.prefix}{kind}.weight" for kind in kinds]


def to_ours(found: Mapping[str, Tensor], layout: Layout, source: str) -> Weights:
    """Rename, join and check the tensors of a checkpoint; every one is used or named.

    Args:
        found: As in the files.
        layout: What they have to hold.
        source: For messages.

    Returns:
        fp32 tensors under our names.

    Raises:
        CheckpointError: A tensor is missing, unexpected, of another shape, not made of numbers, or
            at odds with the tie; the message names it.
    """
    left = _with_prefix(found, layout.prefix)
    _check_numbers(left, source)
    unused: list[str] = []
    is_tied = _settle_output(left, layout, unused, source)
    _pop_unread(left, layout, unused, source)
    if "logits_bias" in layout.names and _LOGITS_BIAS not in left:
        left[_LOGITS_BIAS] = torch.zeros(1, layout.vocab_size)
    shapes = expected_shapes(layout, is_tied=is_tied)
    names = layout.all_names(shapes)
    _check_shapes(left, names, shapes, source)
    tensors = {ours: torch.cat([left[n].float() for n in names[ours]]) for ours in names}
    if "logits_bias" in tensors:
        tensors["logits_bias"] = tensors["logits_bias"].flatten()
    return Weights(tensors, is_tied, tuple(unused))


def to_theirs(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Undo `to_ours`: split and rename the tensors of our model."""
    names = layout.all_names(tensors)
    written: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        tensor = tensors[ours].detach().float().cpu()
        if ours == "logits_bias":
            tensor = tensor[None]
        parts = zip(theirs, tensor.chunk(len(theirs)), strict=True)
        written |= {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts}
    if not layout.tie:
        # transformers 5 unties all of them, and would draw those that are missing.
        first, *copies = layout.embedding_names()
        written |= {name: written[first].clone() for name in copies}
    # transformers computes these tables too, but warns where Pegasus lacks them.
    tables = _position_tables(layout)
    return written | {name: _sinusoidal(layout.model) for name in tables}


def expected_shapes(layout: Layout, *, is_tied: bool) -> dict[str, torch.Size]:
    """Return the shape of each of our weights, without making any."""
    model = dataclasses.replace(layout.model, tie_embeddings=is_tied)
    with torch.device("meta"):
        empty = Seq2SeqTransformer(
            model, layout.vocab_size, attn=layout.attention, conventions=layout.conventions
        )
    return {name: tensor.shape for name, tensor in empty.state_dict().items()}


def _with_prefix(found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Name the tensors of a model that was saved without its head as with it."""
    if any(name.startswith(prefix) for name in found):
        return dict(found)
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}


def _check_numbers(found: Mapping[str, Tensor], source: str) -> None:
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{source}: {name} has the type {tensor.dtype}, but only floating point weights "
                "can be loaded; take a version that isn't quantised."
            )
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{source}: {name} isn't finite; copy or download it again.")


def _settle_output(left: dict[str, Tensor], layout: Layout, unused: list[str], source: str) -> bool:
    """Leave one embedding, and an output matrix only if it isn't the embedding; say if it is."""
    embedding = _pop_embedding(left, layout, unused, source)
    head = left.pop(HEAD, None)
    is_tied = _is_tied(embedding, head, layout.tie, source)
    left[layout.embedding_names()[0]] = embedding
    if head is not None:
        if is_tied:
            unused.append(HEAD)
        else:
            left[HEAD] = head
    return is_tied


def _pop_embedding(
    left: dict[str, Tensor], layout: Layout, unused: list[str], source: str
) -> Tensor:
    """Take the embedding and its copies out, and refuse copies that differ."""
    stored = [name for name in layout.embedding_names() if name in left]
    if not stored and layout.tie is not False and HEAD in left:
        stored = [HEAD]
    if not stored:
        raise CheckpointError(f"{source} lacks {layout.embedding_names()[0]}.")
    tensors = [left.pop(name) for name in stored]
    for name, tensor in zip(stored[1:], tensors[1:], strict=True):
        if not torch.equal(tensor, tensors[0]):
            raise CheckpointError(
                f"{source}: {stored[0]} and {name} differ, but this model has one embedding for "
                "both sides."
            )
    unused += stored[1:]
    return tensors[0]


def _is_tied(embedding: Tensor, head: Tensor | None, tie: bool | None, source: str) -> bool:
    differs = head is not None and not torch.equal(head, embedding)
    if tie is None:
        return not differs
    if tie and differs:
        raise CheckpointError(
            f"{source}: config.json says tie_word_embeddings, but {HEAD} differs from the "
            "embedding; set the key to false if the model was trained untied."
        )
    if not tie and head is None:
        raise CheckpointError(
            f"{source}: config.json says tie_word_embeddings: false, but there is no {HEAD}."
        )
    return tie


def _pop_unread(left: dict[str, Tensor], layout: Layout, unused: list[str], source: str) -> None:
    tables = [name for name in _position_tables(layout) if name in left]
    for name in tables:
        _check_sinusoidal(left[name], name, layout.model, source)
    unread = [name for name in _UNREAD if name in left] + tables
    for name in unread:
        del left[name]
    unused += unread


def _position_tables(layout: Layout) -> list[str]:
    """Name the tables of sines and cosines that a file may hold, but needn't."""
    if layout.model.positions != "sinusoidal":
        return []
    return [f"{layout.prefix}{side}.embed_positions.weight" for side in ("encoder", "decoder")]


def _sinusoidal(model: ModelConfig) -> Tensor:
    return SinusoidalPositions(model.max_positions, model.d_model).table


def _check_sinusoidal(stored: Tensor, name: str, model: ModelConfig, source: str) -> None:
    """Refuse a stored table of positions that isn't the one that we compute."""
    table = _sinusoidal(model)
    # 1e-3: files may hold the table in half precision.
    if stored.shape != table.shape or not torch.allclose(stored.float(), table, atol=1e-3):
        raise CheckpointError(f"{source}: {name} isn't the usual table of sines and cosines.")


def _check_shapes(
    left: Mapping[str, Tensor], names: Names, shapes: Mapping[str, torch.Size], source: str
) -> None:
    missing, differing, known = [], [], set()
    for ours, theirs in names.items():
        rows, *columns = shapes[ours]
        wanted = [1, rows] if ours == "logits_bias" else [rows // len(theirs), *columns]
        known |= set(theirs)
        missing += [name for name in theirs if name not in left]
        differing += [
            f"{name} ({list(left[name].shape)} in the file, {wanted} by config.json)"
            for name in theirs
            if name in left and list(left[name].shape) != wanted
        ]
    told = {
        "it lacks": missing,
        "it holds unexpectedly": sorted(left.keys() - known),
        "it differs in": differing,
    }
    if any(told.values()):
        parts = "; ".join(f"{verb} {listed(names)}" for verb, names in told.items() if names)
        raise CheckpointError(f"{source} doesn't fit its config.json: {parts}.")
