"""Settings of the model."""

from dataclasses import dataclass

from sparseformer.config.checks import require, require_at_least, require_share
from sparseformer.config.choices import (
    Activation,
    AttnName,
    BackendName,
    NormName,
    NormPosition,
    PositionName,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The size and the parts of an encoder-decoder transformer."""

    d_model: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads of every attention; divides d_model, unless head_dim is set."""
    head_dim: int | None = None
    """Width of one head; unset, d_model / num_heads. T5's heads aren't that wide."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped or multi-query attention); divides num_heads; else num_heads."""
    ffn_dim: int = 256
    """Inner width of the feed-forward blocks."""
    encoder_layers: int = 2
    decoder_layers: int = 2
    dropout: float = 0.0
    """Dropout of embeddings and of every block's output."""
    attention_dropout: float = 0.0
    """Dropout of the attention probabilities."""
    activation: Activation = "relu"
    """Non-linearity of the feed-forward blocks; gated_* multiply by a second projection."""
    norm: NormName = "layer_norm"
    norm_position: NormPosition = "pre"
    """pre: normalise the input of a block; post: normalise the sum after it."""
    positions: PositionName = "sinusoidal"
    max_positions: int = 512
    """Longest sequence; learned positions have this many rows, and longer input is refused."""
    tie_embeddings: bool = True
    """Use one matrix for the input embedding and the output projection."""
    encoder_attn: AttnName | None = None
    """Attention of the encoder, when it differs from --attn."""
    decoder_attn: AttnName | None = None
    """Self-attention of the decoder, when it differs from --attn."""
    cross_attn: AttnName | None = None
    """Attention from decoder to encoder, when it differs from --attn."""
    alpha: float | None = None
    """entmax: the alpha of every head; entmax_adaptive: where each head starts; in [1, 2]. Unset,
    1.5; for entmax_adaptive with --init-from 1.05, near the softmax that the weights know."""
    attn_k: int = 8
    """topk attention: keys that a query keeps."""
    attn_p: float = 0.9
    """topp attention: the softmax mass that a query keeps."""
    backend: BackendName = "auto"
    """What attention runs on. auto: Triton on a GPU; on a CPU compiled C++, or PyTorch without a
    compiler. triton on a CPU needs TRITON_INTERPRET=1 and is for tests."""

    def __post_init__(self) -> None:
        ones = ("d_model", "num_heads", "head_dim", "num_kv_heads", "ffn_dim", "max_positions")
        require_at_least("model", self, 1, "attn_k", *ones)
        require_at_least("model", self, 1, "encoder_layers", "decoder_layers")
        require_share("model", self, "dropout", "attention_dropout")
        require(1.0 <= self.start_alpha <= 2.0, "model.alpha", self.alpha, "in [1, 2]")
        require(0.0 < self.attn_p <= 1.0, "model.attn_p", self.attn_p, "in (0, 1]")
        divisor = f"a divisor of model.d_model = {self.d_model}"
        fits = self.head_dim is not None or self.d_model % self.num_heads == 0
        require(fits, "model.num_heads", self.num_heads, divisor)
        kv_heads = self.num_kv_heads or self.num_heads
        divisor = f"a divisor of model.num_heads = {self.num_heads}"
        require(self.num_heads % kv_heads == 0, "model.num_kv_heads", kv_heads, divisor)
        if self.positions == "rotary":
            head_dim = self.head_dim or self.d_model // self.num_heads
            require(head_dim % 2 == 0, "the width of a head", head_dim, "even for rotary")

    @property
    def start_alpha(self) -> float:
        """The alpha of entmax, and where that of entmax_adaptive starts."""
        return 1.5 if self.alpha is None else self.alpha
