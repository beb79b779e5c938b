"""Encoder and decoder: stacks of blocks between embedded input and last norm."""

from typing import NamedTuple, cast

from torch import Tensor, nn

from sparseformer.config import AttnName, ModelConfig
from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.blocks import (
    Conventions,
    DecoderBlock,
    EncoderBlock,
    StackPositions,
    scale_branches,
)
from sparseformer.nn.cache import DecoderCache
from sparseformer.nn.layers import make_norm


class Memory(NamedTuple):
    """What the encoder hands to the decoder: states [B, S, d_model], real positions int [B]."""

    states: Tensor
    length: Tensor


class _Stack(nn.Module):
    """Hold what encoder and decoder share: positions, dropout, first and last norm."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: list[EncoderBlock] | list[DecoderBlock],
        *,
        bidirectional: bool,
        conventions: Conventions,
    ) -> None:
        super().__init__()
        self.positions = StackPositions(
            config, bidirectional=bidirectional, conventions=conventions
        )
        final_norm = conventions.final_norm
        has_final = config.norm_position == "pre" if final_norm is None else final_norm
        self.first_norm = self._norm(config, conventions, conventions.embedding_norm)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = self._norm(config, conventions, has_final)
        self.dropout = nn.Dropout(config.dropout)
        scale_branches(self.blocks, config.norm_position)

    @staticmethod
    def _norm(config: ModelConfig, conventions: Conventions, wanted: bool) -> nn.Module:
        if not wanted:
            return nn.Identity()
        return make_norm(config.norm, config.d_model, eps=conventions.norm_eps)

    def _enter(self, x: Tensor, start: int) -> Tensor:
        entered: Tensor = self.dropout(self.first_norm(self.positions.add(x, start)))
        return entered


class TransformerEncoder(_Stack):
    """Turn a sequence of vectors into a sequence of vectors that know each other.

    Args:
        config: Sizes and parts; `encoder_layers` blocks. Its `encoder_attn` isn't read: `attn` is.
        attn: The map of every self-attention.
        conventions: What published models settle differently.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attn: AttnName = "softmax",
        conventions: Conventions | None = None,
    ) -> None:
        conventions = conventions or Conventions()
        blocks = [EncoderBlock(config, attn, conventions) for _ in range(config.encoder_layers)]
        super().__init__(config, blocks, bidirectional=True, conventions=conventions)

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        """Encode x; positions are added here.

        Args:
            x: Embedded input, [B, S, d_model], padded on the right.
            length: Real positions of each row, int [B]; unset, all are real.

        Returns:
            [B, S, d_model]; a real position never depends on padding.

        Raises:
            ValueError: If S is more than the learned or sinusoidal positions.
        """
        bias = self.positions.bias(x, 0)
        rotary = self.positions.rotary(x, 0)
        x = self._enter(x, 0)
        for block in self.blocks:
            x = block(x, key_length=length, relative_bias=bias, rotary=rotary)
        final: Tensor = self.final_norm(x)
        return final

    def attention_layers(self) -> dict[str, list[MultiheadAttention]]:
        """Return the attention layers by name: "encoder_self"."""
        blocks = cast(list[EncoderBlock], list(self.blocks))
        return {"encoder_self": [block.self_attention for block in blocks]}


class TransformerDecoder(_Stack):
    """Turn the vectors of a prefix into vectors that know the prefix and the memory.

    Args:
        config: Sizes and parts; `decoder_layers` blocks. Its `decoder_attn` and `cross_attn`
            aren't read: the arguments are.
        attn: The map of every self-attention.
        cross_attn: The map of every attention to the memory; unset, attn.
        conventions: What published models settle differently.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attn: AttnName = "softmax",
        cross_attn: AttnName | None = None,
        conventions: Conventions | None = None,
    ) -> None:
        conventions = conventions or Conventions()
        blocks = [
            DecoderBlock(config, attn, cross_attn or attn, conventions)
            for _ in range(config.decoder_layers)
        ]
        super().__init__(config, blocks, bidirectional=False, conventions=conventions)

    def forward(self, x: Tensor, memory: Memory, cache: DecoderCache | None = None) -> Tensor:
        """Decode x; positions are added here.

        Args:
            x: Embedded prefix, or with a cache its new part, [B, T, d_model].
            memory: What to attend to; not read when there is a cache, which holds its keys.
            cache: From `new_cache`, extended by T positions.

        Returns:
            [B, T, d_model]; a position never depends on later ones.

        Raises:
            ValueError: If the prefix is longer than the learned or sinusoidal positions.
        """
        start = 0 if cache is None else cache.length
        bias = self.positions.bias(x, start)
        rotary = self.positions.rotary(x, start)
        x = self._enter(x, start)
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                memory.states if cache is None else cache.cross[i],
                memory_length=memory.length if cache is None else cache.memory_length,
                relative_bias=bias,
                rotary=rotary,
                cache=None if cache is None else cache.self_attention[i],
            )
        final: Tensor = self.final_norm(x)
        return final

    def new_cache(self, memory: Memory) -> DecoderCache:
        """Compute every layer's keys and values of the memory, once for all steps."""
        layers = self.attention_layers()["cross"]
        cross = [layer.project_key_value(memory.states) for layer in layers]
        return DecoderCache(cross, memory.length)

    def attention_layers(self) -> dict[str, list[MultiheadAttention]]:
        """Return the attention layers by name: "decoder_self" and "cross"."""
        blocks = cast(list[DecoderBlock], list(self.blocks))
        return {
            "decoder_self": [block.self_attention for block in blocks],
            "cross": [block.cross_attention for block in blocks],
        }
