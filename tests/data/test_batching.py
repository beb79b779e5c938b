"""Cuts that keep EOS, batches within the budget, and tensors a model can be trained on."""

import copy
import time

import numpy as np
import pytest
import torch

from sparseformer.data import (
    EncodedPairs,
    Pair,
    Tokenizer,
    collate,
    encode_pairs,
    epoch_batches,
    eval_batches,
)

TOKENIZER = Tokenizer.train(["abcdefgh"], "char", 50)


def _rows(src: list[int], tgt: list[int]) -> EncodedPairs:
    """Rows of the given lengths."""
    return EncodedPairs([[5] * n for n in src], [[6] * n for n in tgt], 0, 0)


def _random_rows(count: int) -> EncodedPairs:
    generator = np.random.default_rng(0)
    src, tgt = generator.integers(2, 40, (2, count)).tolist()
    return _rows(src, tgt)


def _padded(encoded: EncodedPairs, batch: list[int]) -> int:
    longest = (max(len(side[row]) for row in batch) for side in (encoded.src, encoded.tgt))
    return len(batch) * sum(longest)


def test_a_cut_target_keeps_its_end_token_and_its_loss() -> None:
    """Naive truncation dropped EOS, so that a model never learned to stop."""
    encoded = encode_pairs([Pair("abcdefgh", "abcdefgh"), Pair("ab", "abc")], TOKENIZER, 5, 4)
    assert [len(row) for row in encoded.src] == [5, 3]
    assert [len(row) for row in encoded.tgt] == [4, 4]
    assert {row[-1] for row in encoded.src + encoded.tgt} == {TOKENIZER.eos_id}
    assert (encoded.truncated_src, encoded.truncated_tgt) == (1, 1)
    assert collate(encoded, [0], TOKENIZER).labels[0, -1] == TOKENIZER.eos_id


def test_a_row_that_just_fits_is_not_cut() -> None:
    encoded = encode_pairs([Pair("abc", "abcd")], TOKENIZER, 4, 5)
    assert (encoded.truncated_src, encoded.truncated_tgt) == (0, 0)
    assert TOKENIZER.decode(encoded.src[0]) == "abc"


def test_the_prefix_goes_before_every_input_only() -> None:
    encoded = encode_pairs([Pair("a", "b")], TOKENIZER, 9, 9, source_prefix="gh")
    assert TOKENIZER.decode(encoded.src[0]) == "gha"
    assert TOKENIZER.decode(encoded.tgt[0]) == "b"


def test_a_limit_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is 1"):
        encode_pairs([Pair("a", "b")], TOKENIZER, 1, 9)


def test_another_tokenizer_gives_other_ids_for_the_same_pairs() -> None:
    """Ids are never kept between runs, so no old ones can meet a new tokenizer."""
    pairs = [Pair("abc", "cba")]
    other = Tokenizer.train(["hhhcccba"], "char", 50)
    first = encode_pairs(pairs, TOKENIZER, 9, 9)
    assert encode_pairs(pairs, other, 9, 9).src != first.src


@pytest.mark.parametrize("budget", [1, 60, 256, 4096, 10**6])
def test_every_row_is_in_one_batch_within_the_budget(budget: int) -> None:
    encoded = _random_rows(500)
    for batches in (epoch_batches(encoded, budget, seed=3, epoch=1), eval_batches(encoded, budget)):
        assert sorted(row for batch in batches for row in batch) == list(range(500))
        assert all(len(batch) == 1 or _padded(encoded, batch) <= budget for batch in batches)


def test_a_row_longer_than_the_budget_is_a_batch_alone() -> None:
    encoded = _rows([3, 50, 3], [3, 50, 3])
    batches = eval_batches(encoded, 20)
    assert sorted(batches) == [[0, 2], [1]]


def test_order_is_a_pure_function_of_seed_and_epoch() -> None:
    encoded = _random_rows(300)
    orders = {
        (seed, epoch): epoch_batches(encoded, 256, seed, epoch)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert epoch_batches(copy.deepcopy(encoded), 256, 1, 2) == orders[1, 2]
    assert len({str(order) for order in orders.values()}) == 6


def test_seed_and_epoch_are_not_added() -> None:
    """With seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1."""
    encoded = _random_rows(100)
    assert epoch_batches(encoded, 256, 0, 1) != epoch_batches(encoded, 256, 1, 0)


def test_batches_are_full_and_hold_rows_of_similar_length() -> None:
    encoded = _random_rows(5000)
    batches = epoch_batches(encoded, 1024, seed=1, epoch=0)
    padded = sum(_padded(encoded, batch) for batch in batches)
    real = sum(len(row) for side in (encoded.src, encoded.tgt) for row in side)
    assert real / padded > 0.7
    assert padded / (len(batches) * 1024) > 0.93


def test_batch_order_is_not_by_length() -> None:
    encoded = _random_rows(2000)
    sizes = [len(batch) for batch in epoch_batches(encoded, 512, seed=1, epoch=0)]
    assert sizes not in (sorted(sizes), sorted(sizes, reverse=True))
    assert len(set(sizes[: len(sizes) // 4])) > 3


def test_eval_batches_go_from_short_to_long() -> None:
    encoded = _random_rows(200)
    order = [row for batch in eval_batches(encoded, 256) for row in batch]
    totals = [len(encoded.src[row]) + len(encoded.tgt[row]) for row in order]
    assert totals == sorted(totals)


@pytest.mark.parametrize(
    ("budget", "seed", "epoch", "message"),
    [(0, 1, 0, "batch_tokens is 0"), (9, -1, 0, "seed is -1"), (9, 1, -2, "epoch is -2")],
)
def test_impossible_arguments_are_named(budget: int, seed: int, epoch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epoch_batches(_random_rows(3), budget, seed, epoch)


def test_no_rows_give_no_batches() -> None:
    assert epoch_batches(_rows([], []), 100, 1, 0) == []
    assert eval_batches(_rows([], []), 100) == []


def test_dealing_125_000_rows_takes_a_second() -> None:
    encoded = _random_rows(125_000)
    start = time.process_time()
    epoch_batches(encoded, 4096, seed=1, epoch=0)
    assert time.process_time() - start < 1.0


def test_decoder_input_is_shifted_once_and_never_ignored_labels() -> None:
    """Shifting padded labels put -100 into the embedding, or kept EOS as an input."""
    encoded = EncodedPairs([[5, 2], [5, 6, 7, 2]], [[7, 8, 9, 2], [7, 2]], 0, 0)
    batch = collate(encoded, [0, 1], TOKENIZER)
    pad, bos = TOKENIZER.pad_id, TOKENIZER.bos_id
    assert batch.src.tolist() == [[5, 2, pad, pad], [5, 6, 7, 2]]
    assert batch.src_length.tolist() == [2, 4]
    assert batch.decoder_input.tolist() == [[bos, 7, 8, 9], [bos, 7, pad, pad]]
    assert batch.labels.tolist() == [[7, 8, 9, 2], [7, 2, -100, -100]]
    assert (batch.rows, batch.num_targets) == ((0, 1), 6)
    tensors = (batch.src, batch.src_length, batch.decoder_input, batch.labels)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_collating_twice_gives_the_same_batch_and_leaves_the_rows() -> None:
    """A collator that padded its input in place crashed in the second epoch."""
    encoded = _random_rows(20)
    before = copy.deepcopy(encoded)
    first, second = (collate(encoded, [3, 1, 4], TOKENIZER) for _ in range(2))
    assert encoded == before
    assert torch.equal(first.src, second.src)
    assert torch.equal(first.decoder_input, second.decoder_input)
    assert torch.equal(first.labels, second.labels)
