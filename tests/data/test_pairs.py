"""Splits, hashes and rejections of pairs."""

import pytest

from sparseformer.data.pairs import (
    Pair,
    Rejection,
    RejectionLog,
    Splits,
    content_hash,
    hold_out,
    make_dataset,
    merge_rejections,
    shared_inputs,
    shared_sources,
    split_by_group,
    split_of,
)
from sparseformer.errors import DataError


def test_hash_changes_when_a_row_is_added() -> None:
    rows = [Pair("a", "b"), Pair("c", "d")]
    assert content_hash(rows, [], []) != content_hash([*rows, Pair("e", "f")], [], [])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(([Pair("ab", "c")], [], []), ([Pair("a", "bc")], [], []), id="boundary"),
        pytest.param(([Pair("a", "b")], [], []), ([], [Pair("a", "b")], []), id="split"),
        pytest.param(
            ([Pair("a", "b"), Pair("c", "d")], [], []),
            ([Pair("c", "d"), Pair("a", "b")], [], []),
            id="order",
        ),
        pytest.param(([Pair("a", "1 1 bc\n")], [], []), ([Pair("a", "1 1 bc")], [], []), id="end"),
    ],
)
def test_hash_tells_data_sets_apart(left: Splits, right: Splits) -> None:
    assert content_hash(*left) != content_hash(*right)


def test_a_group_is_never_divided_and_never_moves() -> None:
    pairs = [Pair(f"word{i // 3}/{i}", "x") for i in range(900)]
    splits = split_by_group(pairs, lambda pair: pair.src.split("/")[0])
    groups = [{pair.src.split("/")[0] for pair in split} for split in splits]
    assert sum(map(len, groups)) == 300
    assert sum(map(len, splits)) == 900
    assert all(split_of(group) == "test" for group in groups[2])
    assert 5 <= len(groups[1]) <= 30
    assert 5 <= len(groups[2]) <= 30


def test_a_source_in_two_groups_stands_on_one_side() -> None:
    test_group = next(str(i) for i in range(1000) if split_of(str(i)) == "test")
    train_group = next(str(i) for i in range(1000) if split_of(str(i)) == "train")
    rows = {Pair("same", "1"): test_group, Pair("same", "2"): train_group}
    splits = split_by_group(rows, rows.__getitem__)
    assert sorted(splits.test) == sorted(rows)
    assert splits.train == []


def test_held_out_rows_share_no_source_and_keep_their_order() -> None:
    pairs = [Pair(f"s{i % 50}", str(i)) for i in range(200)]
    stay, held = hold_out(pairs, 5, "test")
    assert {pair.src for pair in stay}.isdisjoint(pair.src for pair in held)
    assert len({pair.src for pair in held}) == 2
    assert stay == [pair for pair in pairs if pair in set(stay)]
    assert held == [pair for pair in pairs if pair in set(held)]


def test_one_distinct_source_is_too_few_to_hold_out() -> None:
    with pytest.raises(DataError, match=r"1 distinct training sources .* data.test_file"):
        hold_out([Pair("a", "1"), Pair("a", "2")], 5, "test")


def test_shared_sources_are_counted() -> None:
    splits = Splits([Pair("a", "1"), Pair("b", "1")], [Pair("a", "2")], [Pair("b", "3")])
    assert shared_sources(make_dataset("x", splits)) == {
        "train/validation": 1,
        "train/test": 1,
        "validation/test": 0,
    }


def test_inputs_of_train_that_are_scored_are_counted_once() -> None:
    """Training said nothing when a given test file repeated inputs of the training file."""
    train = [Pair("a", "1"), Pair("b", "1"), Pair("c", "1")]
    splits = Splits(train, [Pair("a", "2"), Pair("x", "3")], [Pair("a", "1"), Pair("b", "3")])
    assert shared_inputs(make_dataset("x", splits)) == 2
    assert shared_inputs(make_dataset("x", Splits(train, [Pair("x", "1")], []))) == 0


def test_rejections_keep_the_first_three_places_and_add_up() -> None:
    log = RejectionLog()
    for line in (2, 4, 6, 8):
        log.add("empty", f"a.csv:{line}")
    log.add("odd", "a.csv:9")
    merged = merge_rejections(log.summary(), {"odd": Rejection(2, ("b.csv:1", "b.csv:2"))})
    assert merged == {
        "empty": Rejection(4, ("a.csv:2", "a.csv:4", "a.csv:6")),
        "odd": Rejection(3, ("a.csv:9", "b.csv:1", "b.csv:2")),
    }
