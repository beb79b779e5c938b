"""Padding, packing, windows, dead rows, relative bias and dropout of attention."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_case import Case, attend_in_chunks
from torch import Tensor

from sparseformer.kernels.entmax_attention import entmax_attention, topk_attention, topp_attention
from sparseformer.testing import largest_tensor

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, 1e18]


def _uniform(queries: int, keys: int, batch: int = 1, **masks: Any) -> Tensor:
    """Return which keys attention over equal scores sees, as lists of 0 and 1: [B, Lq, Lk]."""
    query, key = torch.zeros(batch, 1, queries, 2), torch.zeros(batch, 1, keys, 2)
    value = torch.eye(keys).expand(batch, 1, keys, keys)
    return (entmax_attention(query, key, value, 1.0, **masks) > 0).int().squeeze(1)


def test_key_start_and_key_length_are_slots_of_the_key_axis() -> None:
    seen = _uniform(1, 5, batch=2, key_start=torch.tensor([2, 0]), key_length=torch.tensor([5, 3]))
    assert seen[:, 0].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_causal_alignment_counts_padding_slots() -> None:
    seen = _uniform(3, 4, is_causal=True, key_start=torch.tensor([1]))
    assert seen[0].tolist() == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("window", "is_causal", "rows"),
    [
        (1, False, [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]),
        ((2, 0), False, [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]),
        ((0, 1), True, [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]),
    ],
    ids=["both-sides", "left", "causal-cuts-right"],
)
def test_window_counts_from_the_aligned_diagonal(
    window: Any, is_causal: bool, rows: list[list[int]]
) -> None:
    assert _uniform(4, 5, window=window, is_causal=is_causal)[0].tolist() == rows


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_left_padded_rows_equal_unpadded_ones(is_causal: bool) -> None:
    tensors = Case(batch=1, queries=7, keys=7, alpha=(1.2, 1.7)).tensors()
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    padded = [torch.cat((torch.full_like(x[:, :, :3], 9.0), x), dim=2) for x in (query, key, value)]
    start = torch.tensor([3])
    actual = entmax_attention(*padded, tensors["alpha"], key_start=start, is_causal=is_causal)
    expected = entmax_attention(query, key, value, tensors["alpha"], is_causal=is_causal)
    torch.testing.assert_close(actual[:, :, 3:], expected)


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.5, (1.2, 1.7)], ids=["softmax", "entmax15", "learned"])
def test_content_of_padding_reaches_nothing(alpha: Any, garbage: float) -> None:
    """Zero times NaN is NaN, so hidden slots must not take part in any product."""
    case = Case(queries=6, keys=6, start=(2, 0), length=(6, 4), is_causal=True, alpha=alpha)
    tensors = case.tensors(torch.float32)
    hidden = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.bool)
    results = []
    for content in (0.0, garbage):
        leaves = {}
        for name in ("query", "key", "value"):
            # Queries 0 and 1 of row 0 see no key; those of row 1 all see some.
            slots = hidden if name != "query" else hidden & torch.tensor([[True], [False]])
            leaves[name] = tensors[name].masked_fill(slots[:, None, :, None], content)
            leaves[name].requires_grad_()
        # Products of 1e18 overflow by this scale only, though a norm of them does not.
        scale = 1e3 if garbage == 1e18 else None
        output = attend_in_chunks(24, {**tensors, **leaves}, **case.masks(), scale=scale)
        upstream = torch.ones_like(output)
        upstream[0, :, :2] = content
        results.append((output, *torch.autograd.grad(output, list(leaves.values()), upstream)))
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(clean, spoiled)


def test_content_of_queries_beyond_a_window_reaches_nothing() -> None:
    """Queries 3 to 5 look at slots 2 to 5 only, which are padding."""
    case = Case(queries=6, keys=6, length=(2, 2), window=(1, 1), alpha=(1.2, 1.7))
    tensors = case.tensors(torch.float32)
    tensors["query"][:, :, 3:] = math.nan
    leaves = {name: tensors[name].requires_grad_() for name in ("query", "key", "value")}
    output = attend_in_chunks(24, tensors, **case.masks())
    assert output[:, :, :3].any(-1).all()
    assert not output[:, :, 3:].any()
    for grad in torch.autograd.grad(output.sum(), list(leaves.values())):
        assert bool(grad.isfinite().all())


def test_a_window_costs_its_width_and_not_the_length() -> None:
    x = torch.zeros(1, 1, 1024, 2, requires_grad=True)
    with largest_tensor() as gauge:
        entmax_attention(x, x, x, window=(15, 0)).sum().backward()
    assert gauge.numel <= 64 * (64 + 15), gauge


@pytest.mark.parametrize("spread", [1.0, 3.0], ids=["plain", "times-3"])
def test_packed_causal_rows_without_keys_have_finite_zero_gradients(spread: float) -> None:
    """flash-attention#443: NaN in dQ where sequences of tiny length leave rows without a key."""
    bounds_q = torch.tensor([0, 76, 110, 256], dtype=torch.int32)
    bounds_k = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 256, 32), (1, 2, 3, 32), (1, 2, 3, 32)]
    qkv = [(torch.randn(s, generator=draw) * spread).requires_grad_() for s in shapes]
    output = entmax_attention(
        *qkv, 1.5, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, is_causal=True
    )
    grads = torch.autograd.grad(output.square().sum(), qkv)
    assert all(bool(x.isfinite().all()) for x in (output, *grads))
    dead = torch.ones(256, dtype=torch.bool)
    dead[[75, 109, 255]] = False
    assert not output[:, :, dead].any()
    assert not grads[0][:, :, dead].any()
    assert output[:, :, ~dead].any()


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0], ids=str)
@pytest.mark.parametrize("style", ["length", "minus-inf", "lowest"])
def test_every_way_to_hide_all_keys_gives_zero_rows(style: str, alpha: float) -> None:
    """pytorch#109517: NaN where a row is filled with the most negative number."""
    tensors = Case(batch=1, queries=4, keys=4).tensors(torch.float32)
    qkv = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    if style == "length":
        output = entmax_attention(*qkv, alpha, key_length=torch.tensor([0]))
    else:
        bias = torch.zeros(2, 7)
        bias[:, :4] = -math.inf if style == "minus-inf" else LOWEST
        output = entmax_attention(*qkv, alpha, relative_bias=bias)
        # The last query has the offsets -3 to 0 only; the first sees offsets 1 to 3.
        assert output[:, :, 0].any()
    grads = torch.autograd.grad(output.square().sum(), qkv)
    assert not output[:, :, 3].any()
    assert not grads[0][:, :, 3].any()
    assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize(
    ("bounds_q", "bounds_k"),
    [
        ([0, 4, 4, 5, 12], [0, 4, 4, 5, 12]),
        ([0, 0, 3, 9, 12], [0, 2, 3, 3, 12]),
        ([0, 12], [0, 12]),
    ],
    ids=["self", "cross-with-empty", "one"],
)
@pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"window": (2, 1)}], ids=str)
def test_packed_sequences_equal_separate_calls(
    bounds_q: list[int], bounds_k: list[int], masks: dict[str, Any]
) -> None:
    tensors = Case(batch=1, heads=4, queries=12, keys=12, alpha=(1.0, 1.3, 1.6, 2.0)).tensors()
    bias = torch.randn(4, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    packing = {"cu_seqlens_q": torch.tensor(bounds_q), "cu_seqlens_k": torch.tensor(bounds_k)}
    actual = entmax_attention(**tensors, relative_bias=bias, **packing, **masks)
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        part = {name: tensors[name][:, :, k0:k1] for name in ("key", "value")}
        part["query"], part["alpha"] = tensors["query"][:, :, q0:q1], tensors["alpha"]
        size = max(q1 - q0 + k1 - k0 - 1, 0)
        part["relative_bias"] = bias[:, 12 - (q1 - q0) :][:, :size]
        parts.append(entmax_attention(**part, **masks))
    torch.testing.assert_close(actual, torch.cat(parts, dim=2), rtol=0, atol=1e-12)


def test_relative_bias_is_indexed_by_offset() -> None:
    query, key = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 2)
    value = torch.eye(3).view(1, 1, 3, 3)
    bias = torch.tensor([[0.0, 1.0, 2.0, 3.0]])  # offsets -1, 0, 1, 2
    output = entmax_attention(query, key, value, 1.0, relative_bias=bias)
    expected = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]).softmax(-1)
    torch.testing.assert_close(output[0, 0], expected)


def _dropped(dropout_p: float, chunk_elements: int = 1 << 18, **masks: Any) -> Tensor:
    """Return the dropped-out probabilities of uniform softmax over 50 keys, [B, H, Lq, Lk]."""
    zeros = torch.zeros(2, 4, 50, 2)
    tensors = {"query": zeros, "key": zeros, "alpha": 1.0}
    tensors["value"] = torch.eye(50).expand(2, 4, 50, 50)
    torch.manual_seed(7)
    return attend_in_chunks(chunk_elements, tensors, dropout_p=dropout_p, **masks)


def test_dropout_keeps_its_share_and_the_mean() -> None:
    probs = _dropped(0.3)
    kept = probs > 0
    # 20,000 draws: the standard deviation of the share is 0.0032.
    assert abs(float(kept.float().mean()) - 0.7) < 0.013
    torch.testing.assert_close(probs[kept], torch.full_like(probs[kept], 1 / 50 / 0.7))
    # Neither a head, a query nor a key always falls together with its neighbour.
    for dim in (0, 1, 2, 3):
        same = kept.narrow(dim, 1, kept.shape[dim] - 1) == kept.narrow(dim, 0, kept.shape[dim] - 1)
        assert abs(float(same.float().mean()) - 0.58) < 0.02


def test_dropout_repeats_with_the_seed_and_changes_without() -> None:
    first, second = _dropped(0.5), _dropped(0.5)
    assert torch.equal(first, second)
    zeros = torch.zeros(1, 1, 9, 2)
    draws = [entmax_attention(zeros, zeros, zeros + 1.0, 1.0, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*draws)


@pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"window": (5, 3)}], ids=str)
def test_dropout_does_not_depend_on_the_chunks(masks: dict[str, Any]) -> None:
    whole = _dropped(0.4, **masks)
    for chunk_elements in (1, 700, 12_000):
        assert torch.equal(_dropped(0.4, chunk_elements, **masks), whole)


@pytest.mark.parametrize(
    ("attention", "parameter"),
    [(topk_attention, 3), (topp_attention, 0.8)],
    ids=["topk", "topp"],
)
def test_truncated_attention_takes_every_mask(attention: Any, parameter: Any) -> None:
    tensors = Case(queries=6, keys=6, heads=4).tensors()
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    start = torch.tensor([2, 0])
    masks = {"is_causal": True, "window": 4, "key_start": start}
    actual = attention(query, key, value, parameter, **masks)
    assert not actual[0, :, :2].any()
    # Row 0 alone, without its padding.
    alone = [x[:1, :, 2:] for x in (query, key, value)]
    expected = attention(*alone, parameter, is_causal=True, window=4)
    torch.testing.assert_close(actual[:1, :, 2:], expected)
