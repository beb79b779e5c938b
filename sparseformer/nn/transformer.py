"""The encoder-decoder transformer over token ids."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseformer.config import AttnName, ModelConfig
from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.blocks import Conventions
from sparseformer.nn.cache import DecoderCache
from sparseformer.nn.mappings import AdaptiveAlpha
from sparseformer.nn.stacks import Memory, TransformerDecoder, TransformerEncoder

__all__ = [
    "AttentionChoice",
    "Conventions",
    "DecoderCache",
    "Memory",
    "Seq2SeqTransformer",
    "TransformerDecoder",
    "TransformerEncoder",
    "alpha_parameters",
]


class AttentionChoice(NamedTuple):
    """The map of each of the three attentions of an encoder-decoder model."""

    encoder_self: AttnName
    decoder_self: AttnName
    cross: AttnName


class Seq2SeqTransformer(nn.Module):
    """An encoder-decoder transformer over token ids.

    Token embeddings are multiplied by sqrt(d_model), for every kind of positions: they start
    with variance 1 / d_model, so that the same matrix serves as the output projection.

    Args:
        config: Sizes and parts. Its encoder_attn, decoder_attn and cross_attn go before an `attn`
            that is one name.
        vocab_size: Rows of the embedding.
        attn: The map of all attentions, or one for each of the three.
        pad_id: The id that `encode` counts as padding when it isn't told lengths.
        conventions: What published models settle differently.

    Raises:
        ValueError: If pad_id is outside the vocabulary.

    Source: Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762.
    """

    logits_bias: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        attn: AttnName | AttentionChoice = "softmax",
        pad_id: int = 0,
        conventions: Conventions | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= pad_id < vocab_size:
            raise ValueError(f"pad_id is {pad_id}, but it must be in [0, {vocab_size}).")
        conventions = conventions or Conventions()
        choice = _resolve_attention(config, attn)
        self.pad_id = pad_id
        scale = conventions.embedding_scale
        self.embedding_scale = config.d_model**0.5 if scale is None else scale
        self.output_scale = conventions.output_scale
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.encoder = TransformerEncoder(config, attn=choice.encoder_self, conventions=conventions)
        self.decoder = TransformerDecoder(
            config, attn=choice.decoder_self, cross_attn=choice.cross, conventions=conventions
        )
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, vocab_size, bias=False)
        bias = torch.zeros(vocab_size) if conventions.logits_bias else None
        self.register_buffer("logits_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the token matrices from a normal distribution of variance 1 / d_model."""
        std = self.embedding.embedding_dim**-0.5
        nn.init.normal_(self.embedding.weight, std=std)
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=std)

    def encode(self, src: Tensor, src_length: Tensor | None = None) -> Memory:
        """Encode the input.

        Args:
            src: Token ids, int64 [B, S], padded on the right.
            src_length: Real tokens of each row, int [B]; unset, up to the last that isn't pad_id.
        """
        if src_length is None:
            places = torch.arange(1, src.shape[1] + 1, device=src.device)
            src_length = ((src != self.pad_id) * places).amax(dim=1)
        states = self.encoder(self._embed(src), src_length)
        return Memory(states, src_length)

    def decode(self, tokens: Tensor, memory: Memory, cache: DecoderCache | None = None) -> Tensor:
        """Compute the hidden states that predict the token after each of `tokens`.

        Args:
            tokens: Decoder input ids, int64 [B, T], padded on the right; with a cache, the next T.
            memory: From `encode`; not read when there is a cache, which holds its keys.
            cache: From `new_cache`, extended by T tokens.

        Returns:
            [B, T, d_model], such that `logits` is a product with `output_weight`.
        """
        hidden: Tensor = self.decoder(self._embed(tokens), memory, cache)
        return hidden if self.output_scale == 1.0 else hidden * self.output_scale

    def forward(self, src: Tensor, src_length: Tensor | None, decoder_input: Tensor) -> Tensor:
        """Return decode(decoder_input, encode(src, src_length)), [B, T, d_model]."""
        return self.decode(decoder_input, self.encode(src, src_length))

    @property
    def output_weight(self) -> Tensor:
        """The output projection, [vocab_size, d_model]; with tied embeddings the embedding."""
        return self.embedding.weight if self.output is None else self.output.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary for hidden states [..., d_model]; returns [..., vocab_size]."""
        return F.linear(hidden, self.output_weight, self.logits_bias)

    def new_cache(self, memory: Memory) -> DecoderCache:
        """Start decoding `memory` token by token."""
        return self.decoder.new_cache(memory)

    def attention_layers(self) -> dict[str, list[MultiheadAttention]]:
        """Return the attention layers by name: "encoder_self", "decoder_self" and "cross"."""
        return self.encoder.attention_layers() | self.decoder.attention_layers()

    def alphas(self) -> dict[str, list[list[float]]]:
        """Return the present alpha of every head, by attention, layer and head.

        Softmax is 1.0 and sparsemax 2.0; attentions without an alpha (topk, topp) are left out.
        """
        found = {
            name: [alphas for layer in layers if (alphas := layer.alphas()) is not None]
            for name, layers in self.attention_layers().items()
        }
        return {name: layers for name, layers in found.items() if layers}

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        return embedded * self.embedding_scale


def alpha_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of every learned alpha in a model, for their own learning rate."""
    modules = (module for module in model.modules() if isinstance(module, AdaptiveAlpha))
    return [parameter for module in modules for parameter in module.parameters()]


def _resolve_attention(config: ModelConfig, attn: AttnName | AttentionChoice) -> AttentionChoice:
    if isinstance(attn, AttentionChoice):
        return attn
    return AttentionChoice(
        config.encoder_attn or attn, config.decoder_attn or attn, config.cross_attn or attn
    )
