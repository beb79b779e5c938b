"""Multi-head attention whose probabilities may be sparse, with a fixed or a learned alpha."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from sparseformer.config import AttnName, BackendName
from sparseformer.nn.attention_map import AttentionMap, AttentionOptions
from sparseformer.nn.cache import KeyValue, KeyValueCache
from sparseformer.nn.positions import RotaryAngles, apply_rotary


class MultiheadAttention(AttentionMap):
    """Let every query position read a weighted mean of values, in several heads.

        head h:  O_h = map(scale * Q_h K_g^T + bias) V_g,   output = [O_1 ... O_H] W_o

    where map turns a row of scores into probabilities, and g is the key-value head that the query
    head h shares. One matrix `in_proj` = [W_q; W_k; W_v] serves self- and cross-attention.

    Args:
        d_model: Width of the input and the output.
        num_heads: Query heads H.
        num_kv_heads: Key and value heads, a divisor of H; unset, H.
        attn: The map. softmax, entmax15 and sparsemax are entmax with alpha 1, 1.5 and 2; entmax
            takes `alpha`; entmax_adaptive learns one alpha per head; topk keeps a query's `k`
            largest scores; topp the fewest that hold the softmax mass `p`.
        alpha: entmax: the alpha in [1, 2]; entmax_adaptive: where every head, or each head of a
            sequence, starts, inside (1, 2).
        k: topk: keys that a query keeps, at least 1.
        p: topp: softmax mass that a query keeps, in (0, 1].
        head_dim: Width D of one head; unset, d_model / num_heads.
        bias: Whether the projections have biases.
        dropout: Dropout of the probabilities, in [0, 1).
        scale: Factor of the scores; unset, D ** -0.5.
        backend: What it runs on, as for `sparseformer.functional.entmax_attention`.

    Raises:
        ValueError: If a value is outside its range.

    Source: Vaswani et al. 2017, arXiv 1706.03762; Correia et al. 2019, "Adaptively Sparse
    Transformers", arXiv 1909.00015; Ainslie et al. 2023 (grouped queries), arXiv 2305.13245.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        attn: AttnName = "softmax",
        alpha: float | Sequence[float] = 1.5,
        k: int = 8,
        p: float = 0.9,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: BackendName = "auto",
    ) -> None:
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError(f"num_heads is {num_heads}, but it must divide d_model {d_model}.")
            head_dim = d_model // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {num_kv_heads}, but it must divide num_heads {num_heads}."
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}, but it must be in [0, 1).")
        super().__init__(num_heads, attn, alpha, k, p)
        self.d_model = d_model
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.scale = scale
        self.backend: BackendName = backend
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.in_proj = nn.Linear(d_model, sum(self.sizes), bias=bias)
        self.out_proj = nn.Linear(num_heads * head_dim, d_model, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the four matrices by Xavier's uniform rule, each by itself; zero biases."""
        for weight in (*self.in_proj.weight.split(self.sizes), self.out_proj.weight):
            nn.init.xavier_uniform_(weight)
        for linear in (self.in_proj, self.out_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def extra_repr(self) -> str:
        return f"{self.attn}, d_model={self.d_model}, heads={self.num_heads}/{self.num_kv_heads}"

    def forward(
        self,
        query: Tensor,
        key_value: Tensor | KeyValue | None = None,
        *,
        is_causal: bool = False,
        key_start: Tensor | None = None,
        key_length: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        relative_bias: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        rotary: RotaryAngles | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend from query to key_value, or to query itself (self-attention).

        Masks and biases mean what they mean in `sparseformer.functional.entmax_attention`.

        Args:
            query: [B, Lq, d_model].
            key_value: [B, Lk, d_model], or what `project_key_value` made of it.
            is_causal: Hide keys after the query; the last query sees the last key.
            key_start: First real key of each row, int [B]; unset, 0.
            key_length: One past the last real key of each row, int [B]; unset, Lk.
            cu_seqlens_q: Borders of packed query sequences, int [N + 1].
            cu_seqlens_k: Borders of packed key sequences, int [N + 1].
            relative_bias: [H, Lq + Lk - 1], added to the score of row i and key j at index
                j - i + Lq - 1.
            window: Keys to see on both sides, or (before, after).
            rotary: Angles of the query's positions; self-attention only.
            cache: Keys and values of earlier calls, which the new ones join; self-attention only.

        Returns:
            [B, Lq, d_model].

        Raises:
            ValueError: If sizes don't fit, or rotary or cache come with key_value.
        """
        self._check_input("query", query)
        if key_value is None:
            q, k, v = self._project_self(query, rotary)
            if cache is not None:
                k, v = cache.append(k, v)
        else:
            if rotary is not None or cache is not None:
                raise ValueError("rotary and cache are for self-attention; leave out key_value.")
            q = self._heads(self._project_part(query, 0))
            k, v = self.project_key_value(key_value) if isinstance(key_value, Tensor) else key_value
        options = AttentionOptions(
            is_causal=is_causal,
            key_start=key_start,
            key_length=key_length,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            relative_bias=relative_bias,
            window=window,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            backend=self.backend,
        )
        mixed = self.attend(q, k, v, options)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def project_key_value(self, states: Tensor) -> KeyValue:
        """Compute the keys and values of states [B, L, d_model] once, for several calls."""
        self._check_input("key_value", states)
        key, value = self._project_part(states, 1).split(self.sizes[1:], dim=-1)
        return KeyValue(self._heads(key), self._heads(value))

    def _project_self(
        self, query: Tensor, rotary: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.in_proj(query).split(self.sizes, dim=-1)
        q, k, v = (self._heads(part) for part in parts)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        return q, k, v

    def _project_part(self, x: Tensor, part: int) -> Tensor:
        """Apply the query rows (part 0) or the key and value rows (part 1) of `in_proj` to x."""
        sizes = [self.sizes[0], sum(self.sizes[1:])]
        bias = self.in_proj.bias
        return F.linear(
            x,
            self.in_proj.weight.split(sizes)[part],
            None if bias is None else bias.split(sizes)[part],
        )

    def _heads(self, x: Tensor) -> Tensor:
        """Split [B, L, heads * D] into [B, heads, L, D]; a view."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _check_input(self, name: str, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but it must be [B, L, {self.d_model}]."
            )
