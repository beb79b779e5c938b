"""The arguments of the attention operator, flat and in its order."""

from typing import NamedTuple

from torch import Tensor


class Arguments(NamedTuple):
    """One call, whose shapes and types are known to fit together.

    Attributes:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D].
        value: [B, Hkv, Lk, Dv].
        alpha: [Hq], or None where one number says it all.
        relative_bias: [Hq, Lq + Lk - 1], or None.
        key_start: int [B], first visible key; None for 0.
        key_end: int [B], one past the last visible key; None for Lk.
        cu_seqlens_q: int [S + 1], borders of packed queries, or None.
        cu_seqlens_k: int [S + 1], borders of packed keys, or None.
        seed: int64 [], of the dropout mask; None without dropout.
        mapping: "entmax", "topk" or "topp".
        parameter: alpha where it isn't a tensor, k or p.
        left: keys that a query sees before its diagonal.
        right: keys that a query sees after its diagonal.
        dropout_p: in [0, 1).
        scale: of the scores.
        backend: what was asked for.
        chunk_elements: scores that the PyTorch backend computes at once.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None
    relative_bias: Tensor | None
    key_start: Tensor | None
    key_end: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    mapping: str
    parameter: float
    left: int
    right: int
    dropout_p: float
    scale: float
    backend: str
    chunk_elements: int

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that may ask for a gradient, in the order of Gradients."""
        return self[:5]


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass; empty tensors where nothing is needed.

    Attributes:
        rows: [B, Hq, Lq, m], one or two numbers for each query.
        direction: [B, Hq, Lq, Dv], sum u v / sum u.
        tiles: a bit for each tile of scores that holds a probability above 0.
    """

    rows: Tensor
    direction: Tensor
    tiles: Tensor


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    query: bool
    key: bool
    value: bool
    alpha: bool
    relative_bias: bool


class Gradients(NamedTuple):
    """The gradients of one call; None where they weren't asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    alpha: Tensor | None  # [Hq]
    relative_bias: Tensor | None
