"""What `sparseformer data SOURCE` prints."""

import io

from rich.console import Console

from sparseformer.data import Pair, PairDataset, Rejection, describe
from sparseformer.data.pairs import Splits, make_dataset
from sparseformer.data.report import quantiles


def _print(dataset: PairDataset) -> str:
    stream = io.StringIO()
    Console(file=stream, width=150).print(describe(dataset))
    return stream.getvalue()


def test_report_shows_counts_hash_rejections_and_examples() -> None:
    splits = Splits([Pair("walk[VBD]", "walked")] * 3, [Pair("go[VBD]", "went")], [])
    rejected = {"not valid JSON": Rejection(4, ("a.jsonl:3", "a.jsonl:5"))}
    dataset = make_dataset("mine", splits, rejected=rejected, baseline="lead_1")
    printed = _print(dataset)
    assert "mine: 4 pairs" in printed
    assert dataset.content_hash in printed
    assert "4 not valid JSON (a.jsonl:3, a.jsonl:5)" in printed
    assert "no input stands in two splits" in printed
    assert "lead_1" in printed


def test_symbols_in_brackets_are_not_taken_for_markup() -> None:
    """The terminal library reads `[VBD]` in plain strings as a style and drops it."""
    printed = _print(make_dataset("x", Splits([Pair("walk[VBD]", "[b]walked")], [], [])))
    assert "walk[VBD]\n  -> [b]walked" in printed


def test_report_warns_of_leaks() -> None:
    printed = _print(make_dataset("x", Splits([Pair("a", "1")], [], [Pair("a", "2")])))
    assert "LEAK: 1 in train/test" in printed


def test_long_texts_are_cut_in_examples_only() -> None:
    printed = _print(make_dataset("x", Splits([Pair("word " * 1000, "t")], [], [])))
    assert "word ..." in printed
    assert "5,000" in printed


def test_control_characters_do_not_reach_the_terminal() -> None:
    """An escape sequence in the data could clear the screen or retitle the terminal."""
    pair = Pair("a\x1b[2J\x9b\x07", "b\n\t\u202ec")
    rejected = {"no value in column \x1b[31m": Rejection(1, ("a\udcff.csv:2",))}
    printed = _print(make_dataset("x\x1b]0;", Splits([pair], [], []), rejected=rejected))
    assert not set(printed) & set("\x1b\x9b\x07\t\u202e\udcff")
    assert r"a\x1b[2J\x9b\x07" in printed
    assert r"-> b\n\t\u202ec" in printed
    assert r"column \x1b[31m (a\udcff.csv:2)" in printed


def test_quantiles_are_lengths_that_occur() -> None:
    assert quantiles(list(range(1, 101))) == "5 50 95 100"
    assert quantiles([3]) == "3 3 3 3"
    assert quantiles([]) == "-"
