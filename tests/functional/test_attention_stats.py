"""The statistics of attention against counts of its dense probabilities."""

from typing import Any

import pytest
import torch
from attention_case import Case

from sparseformer.kernels.entmax_attention import (
    AttentionStats,
    entmax_attention_with_stats,
    topk_attention,
    topk_attention_with_stats,
    topp_attention,
    topp_attention_with_stats,
)
from sparseformer.kernels.entmax_attention.reference import attention_probabilities, visible_keys

MIXED = (1.0, 1.3, 1.7, 2.0)
CASES = {
    "plain": Case(heads=4, key_heads=2, queries=9, keys=11, alpha=MIXED),
    "causal": Case(heads=4, key_heads=4, queries=70, keys=70, alpha=MIXED, is_causal=True),
    "cross-tiles": Case(heads=4, key_heads=1, queries=65, keys=200, alpha=MIXED, spread=6.0),
    "window": Case(heads=4, key_heads=4, queries=140, keys=150, alpha=MIXED, window=(3, 2)),
    "window-off-the-tiles": Case(
        heads=4, key_heads=4, queries=150, keys=150, alpha=MIXED, window=(3, 2), spread=9.0
    ),
    "padding": Case(
        heads=4, key_heads=4, queries=8, keys=130, alpha=MIXED, start=(0, 66), length=(60, 130)
    ),
    "dead-rows": Case(
        heads=4, key_heads=4, queries=6, keys=6, alpha=MIXED, is_causal=True, start=(3, 6)
    ),
}


def _count(case: Case) -> AttentionStats:
    """Count on dense float64 probabilities, tile by tile."""
    tensors, masks = case.tensors(), case.masks()
    visible = visible_keys(case.batch, case.queries, case.keys, **masks)
    probs = attention_probabilities(
        tensors["query"], tensors["key"], tensors["alpha"], visible=visible
    )
    visible = visible.expand_as(probs)
    rows = visible.any(-1).sum((0, 2))
    support = (probs > 0).sum((0, 2, 3))
    entropy = torch.special.entr(probs).sum((0, 2, 3))
    seen, active = (torch.zeros(case.heads), torch.zeros(case.heads))
    for top in range(0, case.queries, 64):
        for left in range(0, case.keys, 64):
            tile = (..., slice(top, top + 64), slice(left, left + 64))
            seen += visible[tile].flatten(2).any(-1).sum(0)
            active += (probs[tile] > 0).flatten(2).any(-1).sum(0)
    shares = support / visible.sum((0, 2, 3)), support / rows, entropy / rows, active / seen
    return AttentionStats(*(x.float() for x in shares))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_statistics_count_the_dense_probabilities(case: Case) -> None:
    _, stats = entmax_attention_with_stats(**case.tensors(), **case.masks())
    for name, actual, expected in zip(stats._fields, stats, _count(case), strict=True):
        assert actual.shape == (case.heads,)
        torch.testing.assert_close(actual, expected, msg=lambda m, name=name: f"{name}: {m}")


def test_sharp_scores_leave_tiles_inactive() -> None:
    stats = _count(CASES["cross-tiles"])
    assert 0 < float(stats.active_tiles[3]) < 1
    assert float(stats.density[0]) == 1.0


def test_uniform_softmax_has_full_density_and_the_entropy_of_its_length() -> None:
    zeros = torch.zeros(2, 3, 4, 8)
    _, stats = entmax_attention_with_stats(zeros, zeros, zeros, 1.0)
    torch.testing.assert_close(stats.density, torch.ones(3))
    torch.testing.assert_close(stats.support_size, torch.full((3,), 4.0))
    torch.testing.assert_close(stats.entropy, torch.full((3,), 4.0).log())


def test_a_head_that_saw_no_key_has_no_statistics() -> None:
    tensors = Case(keys=4, length=(0, 0)).tensors()
    _, stats = entmax_attention_with_stats(**tensors, key_length=torch.tensor([0, 0]))
    assert all(bool(value.isnan().all()) for value in stats)


def test_keys_hidden_by_the_bias_are_not_visible() -> None:
    zeros = torch.zeros(1, 1, 2, 4)
    bias = torch.tensor([[0.0, 0.0, float("-inf")]])
    _, stats = entmax_attention_with_stats(zeros, zeros, zeros, 1.0, relative_bias=bias)
    assert stats.density.tolist() == [1.0]
    assert stats.support_size.tolist() == [1.5]


def test_packed_sequences_are_counted_together() -> None:
    tensors = Case(batch=1, queries=90, keys=90, alpha=(1.2, 1.9)).tensors()
    bounds = torch.tensor([0, 30, 30, 90])
    _, stats = entmax_attention_with_stats(**tensors, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    parts, sizes = [], (30, 60)
    for start, size in zip((0, 30), sizes, strict=True):
        part = {n: tensors[n][:, :, start : start + size] for n in ("query", "key", "value")}
        parts.append(entmax_attention_with_stats(**part, alpha=tensors["alpha"])[1])
    for field in ("support_size", "entropy"):
        first, second = (getattr(part, field) for part in parts)
        torch.testing.assert_close(getattr(stats, field), (first * 30 + second * 60) / 90)


def test_statistics_ignore_dropout_and_chunks_carry_no_gradient() -> None:
    tensors = Case(alpha=(1.2, 1.9), queries=40, keys=40, batch=90).tensors(torch.float32)
    tensors["query"].requires_grad_()
    output, stats = entmax_attention_with_stats(**tensors)
    _, dropped = entmax_attention_with_stats(**tensors, dropout_p=0.5)
    assert output.requires_grad
    assert not any(value.requires_grad for value in stats)
    for plain, with_dropout in zip(stats, dropped, strict=True):
        assert torch.equal(plain, with_dropout)


@pytest.mark.parametrize(
    ("attention", "with_stats", "parameter", "support"),
    [
        (topk_attention, topk_attention_with_stats, 3, 3.0),
        (topp_attention, topp_attention_with_stats, 1e-6, 1.0),
    ],
    ids=["topk", "topp"],
)
def test_truncated_attention_has_statistics(
    attention: Any, with_stats: Any, parameter: Any, support: float
) -> None:
    tensors = Case(queries=5, keys=10).tensors()
    qkv = [tensors[name] for name in ("query", "key", "value")]
    output, stats = with_stats(*qkv, parameter)
    assert torch.equal(output, attention(*qkv, parameter))
    assert stats.support_size.tolist() == [support, support]
    torch.testing.assert_close(stats.density, torch.full((2,), support / 10))
