"""Attention against the dense float64 definition, other implementations, and bad arguments."""

from typing import Any

import entmax
import pytest
import torch
from attention_case import Case, attend_in_chunks, dense_attention
from torch import Tensor
from torch.nn import functional as F

from sparseformer.kernels.entmax_attention import (
    entmax_attention,
    entmax_attention_with_stats,
    topk_attention,
    topp_attention,
)
from sparseformer.testing import assert_close_to_reference, largest_tensor, poison_empty

MIXED = (1.05, 1.333, 1.5, 1.9, 2.0, 1.0)
# Chosen so that nearly every pair of sizes, heads, alphas and masks meets at least once.
CASES = {
    "one-by-one": Case(queries=1, keys=1, dim=1, value_dim=1),
    "decode": Case(queries=1, keys=17, dim=8, is_causal=True),
    "decode-grouped": Case(queries=1, keys=16, heads=6, key_heads=2, alpha=MIXED),
    "decode-padded": Case(queries=1, keys=15, length=(15, 4), is_causal=True, alpha=1.2),
    "one-key": Case(queries=17, keys=1, dim=24, alpha=2.0),
    "two-keys-causal": Case(queries=2, keys=2, is_causal=True, alpha=1.0),
    "square": Case(queries=16, keys=16, dim=16),
    "square-causal": Case(queries=17, keys=17, dim=16, is_causal=True, alpha=1.333),
    "square-softmax": Case(queries=16, keys=15, dim=40, alpha=1.0, value_dim=8),
    "square-sparsemax": Case(queries=15, keys=16, dim=8, alpha=2.0, is_causal=True),
    "long-keys": Case(queries=2, keys=129, dim=8, is_causal=True, alpha=1.9),
    "long-queries": Case(queries=33, keys=7, dim=8, is_causal=True),
    "long-queries-bias": Case(queries=33, keys=7, is_causal=True, bias=True, alpha=1.2),
    "grouped": Case(heads=6, key_heads=3, queries=9, keys=11, alpha=MIXED),
    "multi-query": Case(heads=6, key_heads=1, queries=7, keys=9, alpha=MIXED, is_causal=True),
    "grouped-bias": Case(heads=4, key_heads=2, queries=6, keys=8, bias=True, is_causal=True),
    "three-heads": Case(heads=3, key_heads=3, batch=3, queries=5, keys=7, alpha=1.05),
    "wide-head": Case(queries=5, keys=6, dim=160, value_dim=72, alpha=1.25),
    "wide-value": Case(queries=5, keys=6, dim=1, value_dim=96, alpha=1.75, batch=1),
    "right-pad": Case(batch=3, queries=6, keys=9, length=(9, 4, 1), alpha=1.5),
    "right-pad-grouped": Case(heads=6, key_heads=2, keys=9, length=(3, 8), alpha=MIXED),
    "right-pad-causal": Case(queries=9, keys=9, length=(9, 4), is_causal=True, alpha=1.0),
    "left-pad": Case(queries=7, keys=7, start=(0, 3), alpha=1.333),
    "left-pad-causal": Case(queries=7, keys=7, start=(2, 6), is_causal=True, alpha=2.0),
    "left-pad-cross": Case(queries=3, keys=9, start=(8, 1), is_causal=True, bias=True),
    "both-pads": Case(batch=3, queries=7, keys=8, start=(0, 2, 5), length=(8, 6, 6), alpha=1.1),
    "both-pads-softmax": Case(queries=7, keys=8, start=(1, 2), length=(8, 3), alpha=1.0),
    "empty-row": Case(queries=4, keys=6, start=(3, 0), length=(3, 6), alpha=1.5),
    "all-empty": Case(queries=4, keys=6, length=(0, 0), alpha=1.333),
    "beyond-the-end": Case(queries=4, keys=6, start=(0, 2), length=(99, 7), alpha=1.5),
    "window": Case(queries=12, keys=12, window=(2, 1), alpha=1.5),
    "window-causal": Case(queries=12, keys=12, window=(3, 3), is_causal=True, alpha=1.333),
    "window-self-only": Case(queries=6, keys=6, window=(0, 0), alpha=2.0),
    "window-cross": Case(queries=4, keys=11, window=(2, 0), alpha=1.0),
    "window-long-queries": Case(queries=11, keys=4, window=(1, 2), alpha=1.5, bias=True),
    "window-left-pad": Case(queries=9, keys=9, window=(3, 0), start=(4, 0), alpha=1.2),
    "window-wider-than-keys": Case(queries=4, keys=5, window=(50, 50), is_causal=True),
    "bias": Case(queries=6, keys=6, bias=True, alpha=1.5),
    "bias-cross": Case(queries=3, keys=8, bias=True, heads=6, alpha=MIXED),
    "flat-scores": Case(queries=5, keys=63, spread=1e-6, alpha=1.05),
    "steep-scores": Case(queries=5, keys=20, spread=300.0, alpha=(1.2, 1.6)),
    "no-queries": Case(queries=0, keys=4, is_causal=True),
    "no-keys": Case(queries=4, keys=0, is_causal=True, alpha=1.333),
    "no-batch": Case(batch=0, start=(), is_causal=True),
    "no-dims": Case(dim=0, value_dim=2, keys=4, alpha=1.2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_is_the_dense_definition_for_every_chunk_size(case: Case) -> None:
    tensors = case.tensors()
    expected = dense_attention(case, tensors)
    for chunk_elements in (1, 2 * case.heads * case.keys, 1 << 20):
        actual = attend_in_chunks(chunk_elements, tensors, **case.masks())
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["square-causal", "multi-query", "both-pads", "grouped-bias"])
def test_low_precision_output_is_as_close_as_its_dtype_allows(name: str, dtype: Any) -> None:
    case = CASES[name]
    tensors = case.tensors(dtype)
    actual = attend_in_chunks(1 << 20, tensors, **case.masks())
    assert actual.dtype == dtype
    expected = dense_attention(case, tensors)
    # 16-bit results are rounded once, at the end, so rounding the reference is the baseline.
    baseline = None if dtype == torch.float32 else expected.to(dtype)
    assert_close_to_reference(actual, expected, baseline)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_alpha_one_is_scaled_dot_product_attention(is_causal: bool) -> None:
    tensors = Case(queries=9, keys=9, dim=8, alpha=1.0).tensors()
    qkv = [tensors[name] for name in ("query", "key", "value")]
    expected = F.scaled_dot_product_attention(*qkv, is_causal=is_causal)
    torch.testing.assert_close(entmax_attention(*qkv, 1.0, is_causal=is_causal), expected)
    learned = entmax_attention(*qkv, torch.tensor([1.0, 1.0 + 1e-13]), is_causal=is_causal)
    torch.testing.assert_close(learned, expected)


@pytest.mark.parametrize(
    ("alpha", "peer"),
    [(1.5, entmax.entmax15), (2.0, entmax.sparsemax)],
    ids=["entmax15", "sparsemax"],
)
def test_agrees_with_the_entmax_package(alpha: float, peer: Any) -> None:
    tensors = Case(queries=9, keys=13, dim=8).tensors()
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    expected = peer(query @ key.mT * 0.3, dim=-1) @ value
    actual = entmax_attention(query, key, value, alpha, scale=0.3)
    torch.testing.assert_close(actual, expected)


def test_causal_mask_is_aligned_to_the_last_key() -> None:
    """flash-attention#282: aligned to the first key, a cached decode step lost its newest keys."""
    query, key = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    value = torch.eye(5).view(1, 1, 5, 5)
    seen = entmax_attention(query, key, value, 1.0, is_causal=True)[0, 0] > 0
    assert seen.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_decode_of_a_finished_beam_gives_zero() -> None:
    """entmax#17: training ran, and decoding with every key masked hit an assertion."""
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 5, 16)
    output = entmax_attention(query, key, key, 1.5, key_length=torch.tensor([0]))
    assert torch.equal(output, torch.zeros(1, 1, 1, 16))


@pytest.mark.parametrize("k", [1, 3, 50], ids=["one", "some", "more-than-visible"])
def test_topk_attention_is_softmax_over_the_largest_scores(k: int) -> None:
    tensors = Case(queries=4, keys=9, heads=4, key_heads=2).tensors()
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    scores = query @ key.repeat_interleave(2, dim=1).mT * 0.5
    visible = torch.arange(9) - torch.arange(4)[:, None] <= 5
    scores = scores.masked_fill(~visible, float("-inf"))
    kept = scores >= scores.topk(min(k, 9)).values[..., -1:]
    weights = scores.masked_fill(~kept, float("-inf")).softmax(-1)
    expected = weights @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(topk_attention(query, key, value, k, is_causal=True), expected)


@pytest.mark.parametrize("p", [0.05, 0.7, 1.0], ids=["one", "some", "all"])
def test_topp_attention_keeps_the_fewest_keys_that_hold_the_mass(p: float) -> None:
    tensors = Case(queries=4, keys=9).tensors()
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    probs = (query @ key.mT * 0.5).softmax(-1)
    ordered, index = probs.sort(dim=-1, descending=True)
    kept = torch.zeros_like(probs).scatter(-1, index, (ordered.cumsum(-1) - ordered < p).double())
    weights = probs * kept / (probs * kept).sum(-1, keepdim=True)
    torch.testing.assert_close(topp_attention(query, key, value, p), weights @ value)


def test_any_strides_are_read_right() -> None:
    packed = torch.randn(2, 6, 3, 2, 10, dtype=torch.float64)[..., ::2]
    query, key, value = (x.transpose(1, 2) for x in packed.unbind(2))
    plain = [x.contiguous() for x in (query, key, value)]
    expected = entmax_attention(*plain, 1.5, is_causal=True)
    assert torch.equal(entmax_attention(query, key, value, 1.5, is_causal=True), expected)


def test_reads_no_unset_memory() -> None:
    case = CASES["both-pads"]
    tensors = case.tensors(torch.float32)
    tensors["query"].requires_grad_()
    expected = attend_in_chunks(64, tensors, **case.masks())
    (grad,) = torch.autograd.grad(expected.sum(), tensors["query"])
    with poison_empty():
        output = attend_in_chunks(64, tensors, **case.masks())
        (poisoned,) = torch.autograd.grad(output.sum(), tensors["query"])
    assert torch.equal(output, expected)
    assert torch.equal(poisoned, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, (1.3, 2.0)], ids=str)
def test_huge_scores_stay_normalised(alpha: Any, dtype: Any) -> None:
    tensors = Case(queries=8, keys=64, alpha=alpha).tensors(dtype)
    tensors["query"] = tensors["query"] * 1e4
    tensors["key"] = tensors["key"] * (1.0 if dtype == torch.float32 else 1e4)
    tensors["value"] = torch.ones_like(tensors["value"])
    output = entmax_attention(**tensors).float()
    torch.testing.assert_close(output, torch.ones_like(output), rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.5, (1.3,)], ids=["softmax", "entmax15", "learned"])
def test_memory_grows_with_length_times_chunk(alpha: Any) -> None:
    tensors = Case(batch=1, heads=1, key_heads=1, queries=2048, keys=2048, dim=8).tensors()
    query, key, value = (tensors[x].float().requires_grad_() for x in ("query", "key", "value"))
    tensors = {"query": query, "key": key, "value": value}
    tensors["alpha"] = torch.tensor(alpha).requires_grad_() if isinstance(alpha, tuple) else alpha
    with largest_tensor() as gauge:
        attend_in_chunks(1 << 17, tensors, is_causal=True).sum().backward()
    assert 1 << 16 <= gauge.numel <= 1 << 17, gauge


def test_autocast_changes_nothing_but_the_dtype_of_the_output() -> None:
    tensors = Case(queries=9, keys=9).tensors(torch.float32)
    qkv = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    expected = entmax_attention(*qkv)
    grads = torch.autograd.grad(expected.sum(), qkv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = entmax_attention(*qkv)
        inside = torch.autograd.grad(output.sum(), qkv)
        mixed = entmax_attention(qkv[0].bfloat16(), qkv[1], qkv[2])
    assert torch.equal(output, expected)
    assert all(torch.equal(a, b) for a, b in zip(inside, grads, strict=True))
    assert mixed.dtype == torch.bfloat16


def test_statistics_do_not_change_the_output() -> None:
    tensors = Case(alpha=(1.2, 1.8)).tensors()
    output, _ = entmax_attention_with_stats(**tensors, is_causal=True)
    assert torch.equal(output, entmax_attention(**tensors, is_causal=True))


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape)


BAD = {
    "rank": ({"query": _ones(2, 3, 4)}, "must be \\[B, H, L, D\\], got query \\[2, 3, 4\\]"),
    "head-dim": ({"query": _ones(1, 2, 3, 5)}, "must agree in B, Hkv, Lk and D.*\\[1, 2, 3, 5\\]"),
    "value-length": ({"value": _ones(1, 2, 9, 4)}, "must agree.*value \\[1, 2, 9, 4\\]"),
    "heads": ({"query": _ones(1, 3, 3, 4)}, "3 query heads must be a multiple of the 2 key heads"),
    "integers": ({"query": _ones(1, 2, 3, 4).long()}, "one floating-point dtype.*int64"),
    "mixed-dtypes": ({"key": _ones(1, 2, 5, 4).half()}, "one floating-point dtype.*float16"),
    "alpha": ({"alpha": 2.5}, "alpha is 2.5, but it must be in \\[1, 2\\]"),
    "alpha-of-head": ({"alpha": torch.tensor([1.5, 0.7])}, "alpha of head 1 is 0.7"),
    "alpha-nan": ({"alpha": torch.tensor([float("nan"), 1.5])}, "alpha of head 0 is nan"),
    "alpha-shape": ({"alpha": _ones(3)}, "each of the 2 query heads, got shape \\[3\\]"),
    "key-length": ({"key_length": torch.tensor([3, 3])}, "key_length must hold one integer"),
    "key-start": ({"key_start": torch.tensor([0.0])}, "key_start must hold.*float32"),
    "bias-shape": ({"relative_bias": _ones(2, 8)}, "= \\[2, 7\\], got torch.float32 \\[2, 8\\]"),
    "window": ({"window": (1, -2)}, "window is \\(1, -2\\)"),
    "dropout": ({"dropout_p": 1.0}, "dropout_p is 1.0, but it must be in \\[0, 1\\)"),
    "backend": ({"backend": "cuda"}, "backend is 'cuda', but it must be one of .*'pytorch'"),
    "packed-alone": ({"cu_seqlens_q": torch.tensor([0, 3])}, "must be given together"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    good = {"query": _ones(1, 2, 3, 4), "key": _ones(1, 2, 5, 4), "value": _ones(1, 2, 5, 4)}
    with pytest.raises(ValueError, match=message):
        entmax_attention(**{**good, **arguments})


@pytest.mark.parametrize(
    ("queries", "keys", "message"),
    [
        ([1, 3], [0, 5], "cu_seqlens_q must rise from 0 to the packed length 3.*got \\[1, 3\\]"),
        ([0, 3], [0, 4], "cu_seqlens_k must rise from 0 to the packed length 5.*got \\[0, 4\\]"),
        ([0, 2, 1, 3], [0, 1, 2, 5], "without a decrease, got \\[0, 2, 1, 3\\]"),
        ([0, 1, 3], [0, 5], "must have one length, got 3 and 2"),
    ],
    ids=["start", "end", "decrease", "count"],
)
def test_bad_packing_is_named(queries: list[int], keys: list[int], message: str) -> None:
    bounds = {"cu_seqlens_q": torch.tensor(queries), "cu_seqlens_k": torch.tensor(keys)}
    with pytest.raises(ValueError, match=message):
        entmax_attention(_ones(1, 2, 3, 4), _ones(1, 2, 5, 4), _ones(1, 2, 5, 4), **bounds)


@pytest.mark.parametrize(
    ("attention", "parameter", "message"),
    [
        (topk_attention, 0, "k is 0"),
        (topp_attention, 0.0, "p is 0"),
        (topp_attention, 1.5, "p is 1"),
    ],
    ids=["k", "p-zero", "p-large"],
)
def test_bad_truncation_is_named(attention: Any, parameter: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(_ones(1, 2, 3, 4), _ones(1, 2, 5, 4), _ones(1, 2, 5, 4), parameter)
