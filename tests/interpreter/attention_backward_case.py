"""Problems for the backward kernels of attention: what the forward pass leaves, and the answer."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import probabilities, solve_threshold
from sparseformer.kernels.entmax_attention.arguments import Arguments, Gradients, Saved, Wanted
from sparseformer.kernels.entmax_attention.backward import attention_backward
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.checks import Options, entmax_arguments
from sparseformer.kernels.entmax_attention.masks import AttentionParams, Block, dropout_keep
from sparseformer.kernels.entmax_attention.reference import entmax_rows, visible_keys
from sparseformer.testing import assert_close_to_reference

# One alpha for each of two heads.
LEARNED = (1.2, 1.6)

WORD = 32
BLOCKS = Blocks(16, 16)


@dataclass(frozen=True)
class BackwardCase:
    """Sizes and masks of one problem; small tiles, so that few queries make several."""

    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    queries: int = 20
    keys: int = 37
    dim: int = 16
    value_dim: int = 16
    alpha: float | tuple[float, ...] = 1.5
    is_causal: bool = False
    start: tuple[int, ...] | None = None
    length: tuple[int, ...] | None = None
    window: tuple[int, int] | None = None
    packed_q: tuple[int, ...] | None = None
    packed_k: tuple[int, ...] | None = None
    bias: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    spread: float = 1.5
    blocks: Blocks = BLOCKS

    def arguments(self, dtype: torch.dtype = torch.float32) -> Arguments:
        """Draw the tensors."""
        draw = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        query = normal(self.batch, self.heads, self.queries, self.dim) * self.spread
        key = normal(self.batch, self.key_heads, self.keys, self.dim)
        value = normal(self.batch, self.key_heads, self.keys, self.value_dim)
        bias = normal(self.heads, self.queries + self.keys - 1).to(dtype) if self.bias else None
        alpha: Any = self.alpha
        if isinstance(alpha, tuple):
            alpha = torch.tensor(alpha, dtype=torch.promote_types(dtype, torch.float32))
        options = Options(
            is_causal=self.is_causal,
            key_start=_integers(self.start),
            key_length=_integers(self.length),
            cu_seqlens_q=_integers(self.packed_q),
            cu_seqlens_k=_integers(self.packed_k),
            relative_bias=bias,
            window=self.window,
            dropout_p=self.dropout_p,
            scale=self.scale,
        )
        inputs = (x.to(dtype) for x in (query, key, value))
        arguments = entmax_arguments(*inputs, alpha, options)
        return arguments._replace(seed=torch.tensor(1 << 40) if self.dropout_p else None)

    def grad_output(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw the upstream gradient."""
        draw = torch.Generator().manual_seed(5)
        shape = (self.batch, self.heads, self.queries, self.value_dim)
        return torch.randn(shape, generator=draw).to(dtype)

    def visible(self) -> Tensor:
        """Return which query sees which key, bool [B, 1, Lq, Lk]."""
        if self.packed_q is None or self.packed_k is None:
            return visible_keys(
                self.batch,
                self.queries,
                self.keys,
                is_causal=self.is_causal,
                key_start=_integers(self.start),
                key_length=_integers(self.length),
                window=self.window,
            )
        visible = torch.zeros(1, 1, self.queries, self.keys, dtype=torch.bool)
        for (q0, q1), (k0, k1) in self.segments():
            part = visible_keys(1, q1 - q0, k1 - k0, is_causal=self.is_causal, window=self.window)
            visible[:, :, q0:q1, k0:k1] = part
        return visible

    def segments(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return the queries and the keys of each packed sequence, or of the only one."""
        bounds_q = self.packed_q or (0, self.queries)
        bounds_k = self.packed_k or (0, self.keys)
        return list(zip(pairwise(bounds_q), pairwise(bounds_k), strict=True))

    def bias_entries(self) -> Tensor:
        """Return the entry of the bias that each score takes, 0 between sequences, [Lq, Lk]."""
        entries = torch.zeros(self.queries, self.keys, dtype=torch.int64)
        for (q0, q1), (k0, k1) in self.segments():
            offset = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None]
            entries[q0:q1, k0:k1] = offset + self.queries - 1
        return entries

    def run(
        self, arguments: Arguments, grad_output: Tensor, wanted: Wanted | None = None
    ) -> Gradients:
        """Run the kernels on what `forward_state` says the forward pass leaves."""
        saved = forward_state(self, arguments)
        wanted = wanted or wanted_of(arguments)
        return attention_backward(arguments, saved, grad_output, wanted, self.blocks)


def wanted_of(arguments: Arguments) -> Wanted:
    """Ask for every gradient that the arguments have."""
    return Wanted(*(x is not None for x in arguments.differentiable()))


def reference_gradients(
    case: BackwardCase, arguments: Arguments, grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Return the float64 gradients of the tensors that are given, by autograd (alpha > 1)."""
    tensors = [x for x in arguments.differentiable() if x is not None]
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    given = iter(leaves)
    names = ("query", "key", "value", "alpha", "relative_bias")
    pairs = zip(names, arguments.differentiable(), strict=True)
    wide = arguments._replace(**{name: next(given) for name, x in pairs if x is not None})
    probs = _probabilities(case, wide)
    output = (probs * _keep_factors(case, arguments)) @ _by_query_head(case, wide.value)
    return torch.autograd.grad(output, leaves, grad_output.double())


@torch.no_grad()
def forward_state(case: BackwardCase, arguments: Arguments) -> Saved:
    """Return t, sum u v / sum u and the active tiles, from the dense float64 definition."""
    dtype = arguments.query.dtype
    wide = arguments._replace(
        **{
            name: None if x is None else x.double()
            for name, x in zip(("query", "key", "value"), arguments[:3], strict=True)
        }
    )
    scores = _scores(case, wide)
    alpha = torch.as_tensor(_alpha(arguments), dtype=torch.float64).view(1, -1, 1, 1)
    sees = (scores > -math.inf).any(-1, keepdim=True)
    threshold = solve_threshold(scores, alpha)
    probs, slopes = probabilities(scores, threshold, alpha)
    threshold = threshold.masked_fill(~sees, math.inf)
    upper = (slopes * _keep_factors(case, arguments)) @ _by_query_head(case, wide.value)
    direction = upper / slopes.sum(-1, keepdim=True).clamp_min(0.5)
    rows_dtype = torch.promote_types(dtype, torch.float32)
    return Saved(threshold.to(rows_dtype), direction.to(dtype), tile_bits(probs > 0, case.blocks))


def tile_bits(active: Tensor, blocks: Blocks) -> Tensor:
    """Pack which tiles hold an active score, bool [B, Hq, Lq, Lk], into words of 32 tiles."""
    rows, columns = (-active.shape[2]) % blocks.queries, (-active.shape[3]) % blocks.keys
    padded = torch.nn.functional.pad(active, (0, columns, 0, rows))
    tiles = padded.unflatten(3, (-1, blocks.keys)).unflatten(2, (-1, blocks.queries))
    return pack_bits(tiles.any(5).any(3))


def pack_bits(flags: Tensor) -> Tensor:
    """Pack bool [..., n] into int32 words [..., n / 32]."""
    padded = torch.nn.functional.pad(flags, (0, (-flags.shape[-1]) % WORD)).unflatten(
        -1, (-1, WORD)
    )
    words = (padded.long() << torch.arange(WORD)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _integers(values: tuple[int, ...] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32)


def _alpha(arguments: Arguments) -> float | Tensor:
    return arguments.parameter if arguments.alpha is None else arguments.alpha


def _scores(case: BackwardCase, wide: Arguments) -> Tensor:
    # What is hidden may hold anything, so its rows are replaced before the product.
    visible = case.visible()
    query = torch.where(visible.any(3)[..., None], wide.query, 0.0)
    key = torch.where(visible.any(2)[..., None], wide.key, 0.0)
    scores = query @ key.repeat_interleave(case.heads // case.key_heads, dim=1).mT * wide.scale
    if wide.relative_bias is not None:
        scores = scores + wide.relative_bias.double()[:, case.bias_entries()]
    return scores.masked_fill(~visible, -math.inf)


def _probabilities(case: BackwardCase, wide: Arguments) -> Tensor:
    scores = _scores(case, wide)
    alphas = torch.as_tensor(_alpha(wide), dtype=torch.float64).expand(case.heads)
    return torch.stack([entmax_rows(scores[:, h], alphas[h]) for h in range(case.heads)], dim=1)


def _by_query_head(case: BackwardCase, value: Tensor) -> Tensor:
    value = torch.where(case.visible().any(2)[..., None], value, 0.0)
    return value.repeat_interleave(case.heads // case.key_heads, dim=1)


def _keep_factors(case: BackwardCase, arguments: Arguments) -> Tensor:
    """Return 1 / (1 - dropout_p) where dropout keeps a probability, else 0, [B, Hq, Lq, Lk]."""
    shape = torch.Size((case.batch, case.heads, case.queries, case.keys))
    if not case.dropout_p:
        return torch.ones(shape, dtype=torch.float64)
    seed = 0 if arguments.seed is None else int(arguments.seed)
    params = AttentionParams(scale=1.0, segments=(), dropout_p=case.dropout_p, seed=seed)
    whole = Block(slice(0, case.batch), slice(0, case.queries), slice(0, case.keys), 0, 0)
    keep = dropout_keep(whole, params, shape, torch.empty(0))
    return keep.double() / (1.0 - case.dropout_p)


def hold(
    grads: Gradients, references: tuple[Tensor, ...], baselines: tuple[Any, ...] | None = None
) -> None:
    """Compare what was asked for with the float64 gradients, in their order."""
    given = [grad for grad in grads if grad is not None]
    baselines = baselines or (None,) * len(given)
    for grad, reference, baseline in zip(given, references, baselines, strict=True):
        kind = "alpha" if grad is grads.alpha else "gradient"
        assert_close_to_reference(grad, reference, baseline, kind=kind)
