"""MultiheadAttention: against torch's layer, its equation for every map, masks, caches, records."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseformer.config import ATTN_NAMES, AttnName
from sparseformer.functional import entmax, topk_softmax, topp_softmax
from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.cache import KeyValueCache
from sparseformer.nn.positions import alibi_bias, rotary_angles
from sparseformer.nn.recording import record_attention


def _layer(attn: AttnName = "softmax", **options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, attn=attn, **options)
    if layer.in_proj.bias is not None:
        nn.init.normal_(layer.in_proj.bias)
        nn.init.normal_(layer.out_proj.bias)
    return layer


def _states(batch: int = 2, length: int = 6, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(batch, length, 16, generator=generator)


def _torch_twin(layer: MultiheadAttention) -> nn.MultiheadAttention:
    twin = nn.MultiheadAttention(16, 4, batch_first=True)
    twin.load_state_dict(
        {
            "in_proj_weight": layer.in_proj.weight,
            "in_proj_bias": layer.in_proj.bias,
            "out_proj.weight": layer.out_proj.weight,
            "out_proj.bias": layer.out_proj.bias,
        }
    )
    return twin


@pytest.mark.parametrize("kind", ["self", "padded", "causal", "cross"])
def test_softmax_equals_torch_multihead_attention(kind: str) -> None:
    layer = _layer()
    twin = _torch_twin(layer)
    query = _states().requires_grad_()
    memory = _states(length=5, seed=2)
    length = torch.tensor([5, 3])
    hidden = torch.arange(5 if kind == "cross" else 6) >= length[:, None]
    if kind == "self":
        ours, (theirs, _) = layer(query), twin(query, query, query)
    elif kind == "padded":
        ours = layer(query, key_length=length)
        theirs, _ = twin(query, query, query, key_padding_mask=hidden)
    elif kind == "causal":
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        ours, (theirs, _) = layer(query, is_causal=True), twin(query, query, query, attn_mask=mask)
    else:
        ours = layer(query, memory, key_length=length)
        theirs, _ = twin(query, memory, memory, key_padding_mask=hidden)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    weight = torch.randn_like(ours)
    (d_query,) = torch.autograd.grad((ours * weight).sum(), query)
    (d_twin,) = torch.autograd.grad((theirs * weight).sum(), query)
    torch.testing.assert_close(d_query, d_twin, atol=1e-5, rtol=1e-4)


HEAD_ALPHAS = [1.2, 1.4, 1.6, 1.8]
MAPS: dict[AttnName, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: s.softmax(-1),
    "sparsemax": lambda s: entmax(s, 2.0),
    "entmax15": lambda s: entmax(s, 1.5),
    "entmax": lambda s: entmax(s, 1.25),
    "entmax_adaptive": lambda s: entmax(s, torch.tensor(HEAD_ALPHAS).view(4, 1, 1)),
    "topk": lambda s: topk_softmax(s, 2),
    "topp": lambda s: topp_softmax(s, 0.6),
}


def _by_definition(
    layer: MultiheadAttention, x: Tensor, row_map: Callable[[Tensor], Tensor]
) -> Tensor:
    q, k, v = (
        part.unflatten(-1, (4, -1)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, dim=-1)
    )
    scale = q.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    mixed = row_map(scale * q @ k.transpose(-1, -2)) @ v
    output: Tensor = layer.out_proj(mixed.transpose(1, 2).flatten(2))
    return output


@pytest.mark.parametrize("attn", ATTN_NAMES)
def test_every_map_is_its_equation(attn: AttnName) -> None:
    alpha = HEAD_ALPHAS if attn == "entmax_adaptive" else 1.25
    layer = _layer(attn, alpha=alpha, k=2, p=0.6)
    x = _states()
    expected = _by_definition(layer, x, MAPS[attn])
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)
    if attn != "softmax":
        assert (expected - _by_definition(layer, x, MAPS["softmax"])).abs().max() > 1e-2


def test_head_width_scale_and_missing_biases() -> None:
    layer = _layer(head_dim=6, scale=1.0, bias=False)
    assert [name for name, _ in layer.named_parameters()] == ["in_proj.weight", "out_proj.weight"]
    assert layer.out_proj.weight.shape == (16, 24)
    x = _states()
    expected = _by_definition(layer, x, MAPS["softmax"])
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_repeated_key_value_weights(kv_heads: int) -> None:
    grouped, full = _layer("entmax15", num_kv_heads=kv_heads), _layer("entmax15")
    with torch.no_grad():
        for name in ("weight", "bias"):
            source = getattr(grouped.in_proj, name)
            q, k, v = source.split(grouped.sizes)
            repeated = [
                part.unflatten(0, (kv_heads, 4)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
                for part in (k, v)
            ]
            getattr(full.in_proj, name).copy_(torch.cat([q, *repeated]))
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x, memory = _states(), _states(length=3, seed=2)
    torch.testing.assert_close(grouped(x, is_causal=True), full(x, is_causal=True))
    torch.testing.assert_close(grouped(x, memory), full(x, memory))


def test_projected_memory_serves_as_the_memory() -> None:
    layer = _layer("sparsemax", num_kv_heads=2)
    x, memory = _states(), _states(length=3, seed=2)
    torch.testing.assert_close(layer(x, layer.project_key_value(memory)), layer(x, memory))


def test_masks_and_bias_reach_the_scores() -> None:
    layer = _layer("entmax15")
    x = _states(batch=1, length=7)
    step = torch.arange(7)
    distance = step - step[:, None]
    visible = (step >= 1) & (step < 6) & (distance.abs() <= 2) & (distance <= 0)
    slope = torch.tensor([2.0**-e for e in (2, 4, 6, 8)]).view(4, 1, 1)

    def masked(scores: Tensor) -> Tensor:
        scores = (scores - slope * distance.abs()).masked_fill(~visible, -math.inf)
        return torch.where(visible.any(-1, keepdim=True), entmax(scores, 1.5), 0.0)

    output = layer(
        x,
        is_causal=True,
        key_start=torch.tensor([1]),
        key_length=torch.tensor([6]),
        relative_bias=alibi_bias(4, 7, 7),
        window=(2, 0),
    )
    torch.testing.assert_close(output, _by_definition(layer, x, masked), atol=1e-5, rtol=1e-4)


def test_packed_sequences_equal_separate_ones() -> None:
    layer = _layer("entmax15")
    x = _states(batch=1, length=9)
    borders = torch.tensor([0, 4, 9])
    angles = rotary_angles(4, 9)
    packed = layer(x, is_causal=True, cu_seqlens_q=borders, cu_seqlens_k=borders, rotary=angles)
    first = layer(x[:, :4], is_causal=True, rotary=rotary_angles(4, 4))
    second = layer(x[:, 4:], is_causal=True, rotary=rotary_angles(4, 5))
    torch.testing.assert_close(packed, torch.cat([first, second], 1), atol=1e-5, rtol=1e-4)


def test_dropout_of_probabilities_is_for_training_only() -> None:
    layer, plain = _layer(dropout=0.5), _layer()
    x = _states()
    assert (layer(x) - plain(x)).abs().max() > 1e-2
    torch.testing.assert_close(layer.eval()(x), plain(x))


@torch.no_grad()
def test_cached_steps_equal_the_whole_and_follow_reorder() -> None:
    layer = _layer("entmax15", num_kv_heads=2)
    x = _states(batch=3, length=40)
    whole = layer(x, is_causal=True, rotary=rotary_angles(4, 40))
    cache = KeyValueCache()
    rows = torch.tensor([2, 0, 0, 1])
    parts = []
    for start, end in [(0, 5), (5, 6), (6, 30), (30, 40)]:
        if start == 6:
            cache.reorder(rows)
            x, whole, parts = x[rows], whole[rows], [part[rows] for part in parts]
        angles = rotary_angles(4, end - start, start)
        parts.append(layer(x[:, start:end], is_causal=True, rotary=angles, cache=cache))
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_cache_moves_its_content_only_when_it_doubles() -> None:
    cache = KeyValueCache()
    places = {
        cache.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 3)).key.data_ptr()
        for _ in range(128)
    }
    assert len(places) <= 4
    key, value = cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 3))
    assert key[0, 0, :, 0].tolist() == [1.0] * 128 + [0.0]
    assert value.shape == (1, 1, 129, 3)


def test_cache_refuses_gradients_and_another_batch() -> None:
    layer, cache = _layer(), KeyValueCache()
    with pytest.raises(ValueError, match="gradients are recorded"):
        layer(_states(), cache=cache)
    with torch.no_grad():
        layer(_states(batch=2), cache=cache)
        with pytest.raises(ValueError, match=r"3 rows, but the cache has 2; call cache.reorder"):
            layer(_states(batch=3), cache=cache)


@pytest.mark.parametrize(
    ("attn", "expected"),
    [
        ("softmax", [1.0] * 4),
        ("sparsemax", [2.0] * 4),
        ("entmax15", [1.5] * 4),
        ("entmax", [1.25] * 4),
        ("topk", None),
        ("topp", None),
    ],
)
def test_fixed_alphas(attn: AttnName, expected: list[float] | None) -> None:
    assert _layer(attn, alpha=1.25).alphas() == expected


def test_adaptive_alpha_of_every_head_is_learned() -> None:
    layer = _layer("entmax_adaptive", alpha=HEAD_ALPHAS)
    assert layer.alphas() == pytest.approx(HEAD_ALPHAS, abs=1e-6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(_states()).square().sum().backward()
    optimizer.step()
    changes = [abs(a - b) for a, b in zip(layer.alphas() or [], HEAD_ALPHAS, strict=True)]
    assert min(changes) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn": "hardmax"}, "attn is 'hardmax'.*entmax_adaptive"),
        ({"attn": "entmax", "alpha": 2.5}, "alpha is 2.5"),
        ({"attn": "entmax", "alpha": [1.5] * 4}, "one number"),
        ({"attn": "topk", "k": 0}, "k is 0"),
        ({"attn": "topp", "p": 0.0}, r"p is 0.0.*\(0, 1\]"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
    ids=["attn", "alpha", "alphas", "k", "p", "kv-heads", "dropout"],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(16, 4, **options)


def test_bad_calls_are_named() -> None:
    with pytest.raises(ValueError, match="num_heads is 3"):
        MultiheadAttention(16, 3)
    layer = _layer()
    with pytest.raises(ValueError, match=r"query has shape \(6, 16\).*\[B, L, 16\]"):
        layer(_states()[0])
    with pytest.raises(ValueError, match="key_value has shape"):
        layer(_states(), torch.zeros(2, 3, 8))
    with pytest.raises(ValueError, match="leave out key_value"):
        layer(_states(), _states(), rotary=rotary_angles(4, 6))


@pytest.mark.parametrize(
    ("attn", "low", "high"),
    [
        ("softmax", 1.0, 1.0),
        ("sparsemax", 1 / 6, 0.9),
        ("topk", 2 / 6, 2 / 6),
        ("topp", 1 / 6, 0.9),
    ],
    ids=["softmax", "sparsemax", "topk", "topp"],
)
def test_record_measures_density_and_changes_nothing(
    attn: AttnName, low: float, high: float
) -> None:
    layer = _layer(attn, k=2, p=0.6)
    x = _states()
    before = layer(x)
    with record_attention(layer) as record:
        during = layer(x)
    layer(3 * x)
    torch.testing.assert_close(during, before, atol=0, rtol=0)
    (densities,) = record.densities()["attention"]
    assert len(densities) == 4
    assert all(low - 1e-6 <= density <= high + 1e-6 for density in densities)


def test_record_weights_calls_by_their_queries() -> None:
    layer = _layer("topk", k=2)
    with record_attention(layer) as record:
        layer(_states(batch=3, length=2))
        layer(_states(batch=1, length=8))
    assert record.densities()["attention"][0] == pytest.approx([(6 * 1.0 + 8 * 0.25) / 14] * 4)


def test_record_ends_with_the_block_and_does_not_nest() -> None:
    layer = _layer()
    with pytest.raises(KeyError), record_attention(layer):
        raise KeyError
    assert layer.meter is None
    with record_attention(layer) as record:
        assert record.densities() == {}
        with pytest.raises(ValueError, match="recorded already"), record_attention(layer):
            pass
        layer(_states())
    assert len(record.densities()["attention"]) == 1
    nothing = record_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear has no MultiheadAttention"), nothing:
        pass
