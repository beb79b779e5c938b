"""The forward kernels of attention, interpreted: what they don't do, rare paths, decoding."""

from dataclasses import replace

import pytest
import torch
from attention_backward_case import BackwardCase, forward_state
from attention_forward_case import counting, reference_output
from torch import Tensor

from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward import attention_forward
from sparseformer.kernels.entmax_attention.forward_decode import decode_output
from sparseformer.kernels.entmax_attention.forward_problem import forward_problem
from sparseformer.testing import assert_close_to_reference, poison_empty

ONE_HEAD = BackwardCase(heads=1, key_heads=1)
DECODE = {
    "one-query": BackwardCase(queries=1, keys=133, is_causal=True, bias=True),
    "learned": BackwardCase(heads=4, queries=2, keys=70, alpha=(1.0, 1.2, 1.5, 2.0), bias=True),
    "softmax": BackwardCase(queries=1, keys=70, alpha=1.0),
    "grouped": BackwardCase(heads=6, key_heads=2, queries=3, keys=70, dim=24, value_dim=40),
    "padding": BackwardCase(batch=3, queries=1, keys=80, start=(0, 70, 80), length=(5, 80, 80)),
    "dropout": BackwardCase(queries=2, keys=70, dropout_p=0.4),
    "flat": BackwardCase(queries=1, keys=200, spread=0.01),
}


def one_query(scores: Tensor, value_dim: int = 16) -> tuple[BackwardCase, Arguments]:
    """Return a problem whose only query has these scores."""
    case = replace(ONE_HEAD, queries=1, keys=scores.numel(), value_dim=value_dim, scale=1.0)
    arguments = case.arguments()
    query, key = torch.zeros_like(arguments.query), torch.zeros_like(arguments.key)
    query[..., 0], key[0, 0, :, 0] = 1.0, scores
    return case, arguments._replace(query=query, key=key)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
def test_weights_of_equal_scores_sum_to_one(alpha: float) -> None:
    case, arguments = one_query(torch.zeros(130))
    arguments = arguments._replace(parameter=alpha, value=torch.ones_like(arguments.value))
    output, _ = attention_forward(arguments, True, case.blocks)
    torch.testing.assert_close(output, torch.ones_like(output), rtol=0.0, atol=1e-6)


def test_output_is_computed_again_where_the_sketch_dropped_more_than_it_seemed() -> None:
    """One lane of 16 holds 25 keys of small weight: the two that it keeps tell too little."""
    scores = torch.full((400,), -5.0)
    scores[::16] = -0.5
    scores[1] = 1.494
    case, arguments = one_query(scores)
    with counting() as work:
        output, saved = attention_forward(arguments, True, case.blocks)
    assert work.products == 25 + 3 * 25 + 3 * 25
    assert_close_to_reference(output, reference_output(case, arguments))
    torch.testing.assert_close(saved.rows, forward_state(case, arguments).rows)
    wide = forward_state(case, arguments._replace(query=arguments.query.double()))
    assert_close_to_reference(saved.direction, wide.direction)


def test_the_last_step_is_folded_into_the_output() -> None:
    """One lane of 16 drops 22 keys that weigh 0.003 together: too little to start again."""
    scores = torch.full((400,), -5.0)
    scores[::16] = -0.475
    scores[1] = 1.5
    case, arguments = one_query(scores)
    arguments.value.zero_()[:, :, ::16] = 1.0
    halves = (x.half() for x in arguments[:3])
    arguments = Arguments(*halves, *arguments[3:])
    with counting() as work:
        output, _ = attention_forward(arguments, True, case.blocks)
    assert work.products == 25 + 3 * 25
    expected = reference_output(case, arguments)
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=0.0)


def test_a_sketch_that_holds_the_support_needs_no_refinement() -> None:
    scores = torch.full((400,), -5.0)
    scores[[5, 40, 41, 122, 399]] = torch.tensor([1.0, 0.5, 0.2, 0.9, -0.1])
    case, arguments = one_query(scores)
    with counting() as work:
        attention_forward(arguments, True, case.blocks)
    # Every tile once for the sketch; four hold support and take three products.
    assert work.products == 25 + 3 * 4
    with counting() as work:
        attention_forward(arguments, False, Blocks(16, 16))
    # A few queries are decoded: one product per tile of 64 for the scores, one per active tile.
    assert work.products == 7 + 3


def test_tiles_far_from_the_diagonal_are_scored_once_where_near_keys_score_highest() -> None:
    case = replace(ONE_HEAD, queries=96, keys=96, is_causal=True, scale=1.0)
    arguments, places = case.arguments(), torch.arange(96.0)
    query, key = torch.zeros_like(arguments.query), torch.zeros_like(arguments.key)
    # Key j of query i scores i^2 - (i - j)^2.
    query[..., 0], query[..., 1] = 2 * places, 1.0
    key[..., 0], key[..., 1] = places, -places.square()
    with counting() as work:
        attention_forward(arguments._replace(query=query, key=key), True, case.blocks)
    # Each block of queries has weight in the tile of its diagonal and in the one before.
    assert work.products == 21 + 3 * (6 + 5)


@pytest.mark.parametrize("is_first", [True, False])
def test_all_tiles_of_a_row_longer_than_a_word_are_visited_once(is_first: bool) -> None:
    """From the diagonal of its block, which lies in the first word or in the second one, down."""
    parts = (0, 16, 544), (0, 528, 544)
    packed_q, packed_k = parts if is_first else ((0, 528, 544), (0, 16, 544))
    case = replace(ONE_HEAD, queries=544, keys=544, scale=1.0, packed_q=packed_q, packed_k=packed_k)
    arguments = case.arguments()
    query, key = torch.zeros_like(arguments.query), torch.full_like(arguments.key, -5.0)
    query[:, :, :16] = query[:, :, -16:] = 1.0 / 16
    # The heavy keys of the long row, of the first tile visited and of one in the other word; other
    # rows see 16 equal keys.
    key[:, :, [500, 520 if is_first else 540]] = torch.tensor([[1.0], [1.2]])
    arguments = arguments._replace(query=query, key=key)
    with counting() as work:
        output, _ = attention_forward(arguments, True, case.blocks)
    assert work.products == (33 + 33) + 3 * (2 + 33)
    assert_close_to_reference(output, reference_output(case, arguments))


def test_tiles_above_the_diagonal_are_not_visited() -> None:
    case = replace(ONE_HEAD, queries=80, keys=80, is_causal=True, alpha=1.0)
    with counting() as work:
        attention_forward(case.arguments(), True, case.blocks)
    assert work.products == 2 * 15


def test_keys_in_one_tile_are_scored_once() -> None:
    case = replace(ONE_HEAD, queries=32, keys=60)
    with counting() as work:
        attention_forward(case.arguments(), True, case.blocks)
    assert work.products == 2 * 3


@pytest.mark.parametrize("keep", [True, False])
def test_values_of_tiles_without_weight_are_not_read(keep: bool) -> None:
    scores = torch.full((400,), -5.0)
    scores[[5, 399]] = 1.0
    case, arguments = one_query(scores)
    clean, _ = attention_forward(arguments, keep, case.blocks)
    arguments.value[:, :, 64:384] = torch.nan
    output, _ = attention_forward(arguments, keep, case.blocks)
    assert torch.equal(output, clean)


def test_the_output_lies_between_the_values() -> None:
    case = replace(ONE_HEAD, keys=83)
    arguments = case.arguments()
    output, _ = attention_forward(arguments, True, case.blocks)
    low, high = arguments.value.amin(2, keepdim=True), arguments.value.amax(2, keepdim=True)
    assert bool(((output >= low - 1e-6) & (output <= high + 1e-6)).all())


def test_the_order_of_the_keys_does_not_matter() -> None:
    case = replace(ONE_HEAD, keys=83)
    arguments = case.arguments()
    order = torch.randperm(83, generator=torch.Generator().manual_seed(0))
    key, value = arguments.key[:, :, order], arguments.value[:, :, order]
    output, _ = attention_forward(arguments, True, case.blocks)
    permuted, _ = attention_forward(arguments._replace(key=key, value=value), True, case.blocks)
    torch.testing.assert_close(permuted, output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", DECODE.values(), ids=DECODE)
def test_decoding_gives_the_output_of_the_definition(case: BackwardCase) -> None:
    arguments = case.arguments()
    problem = forward_problem(arguments)
    with poison_empty():
        output = torch.empty(case.batch, case.heads, case.queries, case.value_dim)
        # Few lanes and small tiles, so that few keys make several of each.
        decode_output(problem, 2.0**-22, Launch(), Blocks(16, 16), output, lanes=16)
    assert_close_to_reference(output, reference_output(case, arguments))


def test_decoding_reads_keys_of_a_group_once() -> None:
    case = BackwardCase(heads=4, key_heads=1, queries=1, keys=256, dim=64, value_dim=64, spread=9.0)
    arguments = case.arguments()
    with counting() as work:
        attention_forward(arguments, False)
    key_bytes = arguments.key.numel() * 4
    assert work.loaded_bytes < 2.5 * key_bytes
