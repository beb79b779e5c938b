"""Transformer blocks, and what a stack of them shares: conventions and positions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparseformer.config import AttnName, ModelConfig, PositionName
from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.cache import KeyValue, KeyValueCache
from sparseformer.nn.layers import FeedForward, Residual, make_norm
from sparseformer.nn.positions import (
    LearnedPositions,
    RotaryAngles,
    SinusoidalPositions,
    T5RelativeBias,
    alibi_bias,
    rotary_angles,
)


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What published models settle differently and no run needs to set; the defaults are ours."""

    bias: bool = True
    """Biases in the projections of attention and feed-forward; T5 has none."""
    score_scale: float | None = None
    """Factor of the attention scores; unset, head_dim ** -0.5; T5 has 1.0."""
    norm_eps: float | None = None
    """Added to the variance; unset, 1e-5 for layer_norm and 1e-6 for rms_norm."""
    final_norm: bool | None = None
    """A norm at the end of each stack; unset, with pre-norm only."""
    embedding_norm: bool = False
    """A norm of the embeddings at the start of each stack; BART and mBART have it."""
    embedding_scale: float | None = None
    """Factor of the token embeddings; unset, sqrt(d_model)."""
    position_offset: int = 0
    """Unused rows at the start of learned positions; BART and mBART have 2."""
    position_buckets: int = 32
    """T5's relative positions: rows of the table, a multiple of 4."""
    position_max_distance: int = 128
    """T5's relative positions: from here on, all distances share a bucket."""
    output_scale: float = 1.0
    """Factor of the decoder's last hidden states; T5 with tied embeddings has d_model ** -0.5."""
    logits_bias: bool = False
    """A fixed bias of the logits, which BART and Marian checkpoints hold."""


class StackPositions(nn.Module):
    """Give one stack its positions, of any kind.

    Args:
        config: Its `positions`, `max_positions` and sizes are used.
        bidirectional: True for the encoder, False for the causal decoder.
        conventions: Its fields `position_*` are used.
    """

    def __init__(
        self, config: ModelConfig, *, bidirectional: bool, conventions: Conventions
    ) -> None:
        super().__init__()
        self.kind: PositionName = config.positions
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim or config.d_model // config.num_heads
        self.added: nn.Module | None = None
        self.t5: T5RelativeBias | None = None
        if self.kind == "learned":
            offset = conventions.position_offset
            self.added = LearnedPositions(config.max_positions, config.d_model, offset=offset)
        elif self.kind == "sinusoidal":
            self.added = SinusoidalPositions(config.max_positions, config.d_model)
        elif self.kind == "t5":
            self.t5 = T5RelativeBias(
                config.num_heads,
                conventions.position_buckets,
                conventions.position_max_distance,
                bidirectional=bidirectional,
            )

    def add(self, x: Tensor, start: int) -> Tensor:
        """Add the vectors of positions start, start + 1, ... to x [B, L, d_model], if any."""
        return x if self.added is None else x + self.added(x.shape[1], start)

    def rotary(self, x: Tensor, start: int) -> RotaryAngles | None:
        """Return the rotations of the L positions of x [B, L, d_model], if any."""
        if self.kind != "rotary":
            return None
        return rotary_angles(self.head_dim, x.shape[1], start, device=x.device)

    def bias(self, x: Tensor, start: int) -> Tensor | None:
        """Return the relative bias [H, L + (start + L) - 1] of x [B, L, d_model], if any."""
        query_length, key_length = x.shape[1], start + x.shape[1]
        if self.kind == "alibi":
            return alibi_bias(self.num_heads, query_length, key_length, device=x.device)
        if self.t5 is None:
            return None
        bias: Tensor = self.t5(query_length, key_length)
        return bias


def build_attention(
    config: ModelConfig, attn: AttnName, conventions: Conventions
) -> MultiheadAttention:
    """Build the attention layer that a configuration describes."""
    return MultiheadAttention(
        config.d_model,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        attn=attn,
        alpha=config.start_alpha,
        k=config.attn_k,
        p=config.attn_p,
        head_dim=config.head_dim,
        bias=conventions.bias,
        dropout=config.attention_dropout,
        scale=conventions.score_scale,
        backend=config.backend,
    )


def _build_residual(config: ModelConfig, conventions: Conventions) -> Residual:
    norm = make_norm(config.norm, config.d_model, eps=conventions.norm_eps)
    return Residual(norm, config.norm_position, dropout=config.dropout)


def _build_feed_forward(config: ModelConfig, conventions: Conventions) -> FeedForward:
    return FeedForward(
        config.d_model,
        config.ffn_dim,
        activation=config.activation,
        bias=conventions.bias,
    )


class EncoderBlock(nn.Module):
    """Self-attention, then a feed-forward block, each with a residual connection.

    Args:
        config: Sizes and parts.
        attn: The attention's map.
        conventions: What published models settle differently.
    """

    def __init__(self, config: ModelConfig, attn: AttnName, conventions: Conventions) -> None:
        super().__init__()
        self.self_attention = build_attention(config, attn, conventions)
        self.self_attention_residual = _build_residual(config, conventions)
        self.feed_forward = _build_feed_forward(config, conventions)
        self.feed_forward_residual = _build_residual(config, conventions)

    def forward(
        self,
        x: Tensor,
        *,
        key_length: Tensor | None,
        relative_bias: Tensor | None,
        rotary: RotaryAngles | None,
    ) -> Tensor:
        """Transform x [B, S, d_model], whose rows have key_length real positions."""

        def attend(states: Tensor) -> Tensor:
            output: Tensor = self.self_attention(
                states, key_length=key_length, relative_bias=relative_bias, rotary=rotary
            )
            return output

        x = self.self_attention_residual(x, attend)
        output: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return output


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the memory, then a feed-forward block.

    Args:
        config: Sizes and parts.
        attn: The map of self-attention.
        cross_attn: The map of the attention to the memory.
        conventions: What published models settle differently.
    """

    def __init__(
        self,
        config: ModelConfig,
        attn: AttnName,
        cross_attn: AttnName,
        conventions: Conventions,
    ) -> None:
        super().__init__()
        self.self_attention = build_attention(config, attn, conventions)
        self.self_attention_residual = _build_residual(config, conventions)
        self.cross_attention = build_attention(config, cross_attn, conventions)
        self.cross_attention_residual = _build_residual(config, conventions)
        self.feed_forward = _build_feed_forward(config, conventions)
        self.feed_forward_residual = _build_residual(config, conventions)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeyValue,
        *,
        memory_length: Tensor | None,
        relative_bias: Tensor | None,
        rotary: RotaryAngles | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Transform x [B, T, d_model] given the memory's states, or their keys and values."""

        def attend(states: Tensor) -> Tensor:
            output: Tensor = self.self_attention(
                states, is_causal=True, relative_bias=relative_bias, rotary=rotary, cache=cache
            )
            return output

        def attend_memory(states: Tensor) -> Tensor:
            output: Tensor = self.cross_attention(states, memory, key_length=memory_length)
            return output

        x = self.self_attention_residual(x, attend)
        x = self.cross_attention_residual(x, attend_memory)
        output: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return output


def scale_branches(blocks: nn.ModuleList, norm_position: str) -> None:
    """Shrink the last matrix of every residual branch of a fresh pre-norm stack.

    With n branches each is multiplied by n ** -0.5, so that the sum of all branches starts with
    the variance of one, at any depth (Radford et al. 2019, section 2.3). A post-norm stack
    normalises after every sum and stays as it is.
    """
    if norm_position == "post":
        return
    parts = (MultiheadAttention, FeedForward)
    branches = [module for module in blocks.modules() if isinstance(module, parts)]
    with torch.no_grad():
        for branch in branches:
            branch.out_proj.weight.mul_(len(branches) ** -0.5)
