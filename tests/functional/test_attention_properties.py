"""What holds for attention on any input: order, duplicates, strides, cuts of the batch."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseformer.kernels.entmax_attention import entmax_attention

property_test = settings(derandomize=True, deadline=None, max_examples=30, print_blob=True)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draw query, key, value and alpha of a small problem with grouped heads."""
    size = st.integers(1, 6)
    batch, key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(size) % 3 + 1
    queries, keys, dim, value_dim = (draw(size) for _ in range(4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    heads = key_heads * groups

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    spread = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    return {
        "query": normal(batch, heads, queries, dim) * spread,
        "key": normal(batch, key_heads, keys, dim),
        "value": normal(batch, key_heads, keys, value_dim),
        "alpha": torch.rand(heads, dtype=torch.float64, generator=generator) + 1.0,
    }


@property_test
@given(problems())
def test_output_stays_between_the_smallest_and_the_largest_value(problem: dict[str, Any]) -> None:
    output = entmax_attention(**problem)
    groups = output.shape[1] // problem["value"].shape[1]
    value = problem["value"].repeat_interleave(groups, dim=1)
    assert bool((output <= value.amax(2, keepdim=True) + 1e-9).all())
    assert bool((output >= value.amin(2, keepdim=True) - 1e-9).all())


@property_test
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(problem: dict[str, Any], random: Any) -> None:
    order = list(range(problem["key"].shape[2]))
    random.shuffle(order)
    shuffled = {name: problem[name][:, :, order] for name in ("key", "value")}
    actual = entmax_attention(**{**problem, **shuffled})
    torch.testing.assert_close(actual, entmax_attention(**problem), rtol=0, atol=1e-9)


@property_test
@given(problems())
def test_both_copies_of_a_key_get_the_same_weight(problem: dict[str, Any]) -> None:
    key = torch.cat((problem["key"], problem["key"][:, :, :1]), dim=2)
    keys = key.shape[2]
    value = torch.eye(keys, dtype=torch.float64).expand(*key.shape[:2], keys, keys)
    probs = entmax_attention(problem["query"], key, value, problem["alpha"])
    torch.testing.assert_close(probs[..., 0], probs[..., -1], rtol=0, atol=1e-9)
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]), rtol=0, atol=1e-9)


@property_test
@given(problems(), st.permutations(range(4)), st.integers(1, 3))
def test_strides_do_not_matter(problem: dict[str, Any], order: list[int], step: int) -> None:
    back = [order.index(dim) for dim in range(4)]
    strided = {}
    for name in ("query", "key", "value"):
        memory = problem[name].permute(order).repeat_interleave(step, dim=-1)
        strided[name] = memory[..., ::step].permute(back)
    actual = entmax_attention(**{**problem, **strided})
    assert torch.equal(actual, entmax_attention(**problem))


@property_test
@given(problems(), st.integers(0, 3))
def test_a_cut_of_the_batch_gives_the_same_rows(problem: dict[str, Any], cut: int) -> None:
    whole = entmax_attention(**problem)
    pieces = []
    for part in (slice(0, cut), slice(cut, None)):
        piece = {name: problem[name][part] for name in ("query", "key", "value")}
        pieces.append(entmax_attention(**piece, alpha=problem["alpha"]))
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-10)
