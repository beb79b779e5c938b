"""Positions: closed forms, published implementations, and alignment with a cache."""

import pytest
import torch

from sparseformer.nn.positions import (
    LearnedPositions,
    SinusoidalPositions,
    T5RelativeBias,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    relative_distances,
    rotary_angles,
    t5_buckets,
)


def test_learned_positions_start_behind_the_offset() -> None:
    positions = LearnedPositions(6, 4, offset=2)
    assert positions.weight.shape == (8, 4)
    torch.testing.assert_close(positions(3), positions.weight[2:5])
    torch.testing.assert_close(positions(2, start=4), positions.weight[6:8])


@pytest.mark.parametrize("d_model", [8, 7], ids=["even", "odd"])
def test_sinusoidal_positions_equal_marian(d_model: int) -> None:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(50, d_model).create_weight()
    ours = SinusoidalPositions(50, d_model)
    torch.testing.assert_close(ours(50), theirs, atol=1e-7, rtol=0)
    torch.testing.assert_close(ours(3, start=7), theirs[7:10], atol=1e-7, rtol=0)


def test_sinusoidal_table_is_not_saved() -> None:
    assert not SinusoidalPositions(4, 8).state_dict()


@pytest.mark.parametrize(
    ("positions", "kind"),
    [(LearnedPositions(6, 4, offset=2), "learned"), (SinusoidalPositions(6, 4), "sinusoidal")],
    ids=["learned", "sinusoidal"],
)
def test_too_long_a_sequence_names_both_lengths_and_the_remedy(
    positions: torch.nn.Module, kind: str
) -> None:
    assert positions(3, start=3).shape == (3, 4)
    message = f"7 tokens is longer than the 6 {kind} positions; set model.max_positions to 7"
    with pytest.raises(ValueError, match=message):
        positions(3, start=4)


def test_rotary_equals_complex_multiplication() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8)
    turned = apply_rotary(x, rotary_angles(8, 5, start=2))
    frequency = 10_000.0 ** -(torch.arange(4) / 4)
    angle = torch.arange(2, 7)[:, None] * frequency
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angle)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], dim=-1))


def test_rotary_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 16)
    turned_query = apply_rotary(query.expand(40, 16), rotary_angles(16, 40))
    turned_key = apply_rotary(key.expand(40, 16), rotary_angles(16, 40))
    scores = turned_query @ turned_key.t()
    for distance in (0, 1, 5, -7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert (scores[0, 0] - scores[0, 5]).abs() > 1e-2


def test_rotary_keeps_half_precision_and_refuses_odd_heads() -> None:
    x = torch.randn(1, 1, 2, 4, dtype=torch.bfloat16)
    assert apply_rotary(x, rotary_angles(4, 2)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="head_dim is 5"):
        rotary_angles(5, 2)


@pytest.mark.parametrize(("query_length", "key_length"), [(4, 4), (1, 5), (2, 5), (3, 1)], ids=str)
def test_relative_distances_follow_bottom_right_alignment(
    query_length: int, key_length: int
) -> None:
    distances = relative_distances(query_length, key_length)
    assert len(distances) == query_length + key_length - 1
    for row in range(query_length):
        for column in range(key_length):
            place = row + key_length - query_length
            assert distances[column - row + query_length - 1] == column - place


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20)], ids=["t5", "small"])
def test_t5_buckets_equal_transformers(bidirectional: bool, buckets: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(distances, bidirectional, buckets, farthest)
    actual = t5_buckets(distances, buckets, farthest, bidirectional=bidirectional)
    assert torch.equal(actual, expected)


def test_t5_bias_of_a_cached_step_is_the_last_row_of_the_whole() -> None:
    bias = T5RelativeBias(3, bidirectional=False)
    whole, step = bias(6, 6), bias(1, 6)
    last_row = whole[:, torch.arange(6) - 5 + 5]
    torch.testing.assert_close(step, last_row)
    whole.sum().backward()
    assert bias.weight.grad is not None
    assert bias.weight.grad[1:6].eq(1).all()
    assert bias.weight.grad[0].eq(6).all()


def test_t5_bias_refuses_buckets_that_cannot_hold_the_distances() -> None:
    with pytest.raises(ValueError, match="num_buckets is 30"):
        T5RelativeBias(2, 30, bidirectional=True)
    with pytest.raises(ValueError, match="max_distance 16"):
        T5RelativeBias(2, 32, 16, bidirectional=True)


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [8]),
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
    ],
    ids=["1", "4", "8", "3", "6"],
)
def test_alibi_slopes(num_heads: int, exponents: list[int]) -> None:
    assert alibi_slopes(num_heads) == [2.0**-e for e in exponents]


def test_alibi_bias_is_symmetric_and_zero_at_the_query() -> None:
    bias = alibi_bias(2, 3, 3)
    torch.testing.assert_close(bias[0], -(2.0**-4) * torch.tensor([2.0, 1, 0, 1, 2]))
    torch.testing.assert_close(alibi_bias(2, 1, 3)[1], -(2.0**-8) * torch.tensor([2.0, 1, 0]))
