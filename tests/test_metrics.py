"""Metrics against their definitions, jiwer, rouge_score and hand-computed values."""

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from sparseformer.metrics import (
    METRIC_NAMES,
    UnicodeTokenizer,
    compute_metrics,
    edit_distance,
    metric_signatures,
    split_sentences,
)


def one(name: str, prediction: str, reference: str) -> float:
    return compute_metrics([prediction], [reference], [name])[name]


def table_distance(left: list[int], right: list[int]) -> int:
    """The dynamic program of the textbook."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        above, row = row, [i]
        for j, b in enumerate(right, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


SYMBOLS = st.lists(st.integers(0, 3), max_size=70)


@given(SYMBOLS, SYMBOLS)
def test_edit_distance_agrees_with_the_textbook(left: list[int], right: list[int]) -> None:
    assert edit_distance(left, right) == table_distance(left, right)


def test_edit_distance_passes_machine_words() -> None:
    assert edit_distance(range(1000), range(1, 1001)) == 2


PREDICTIONS = ["the cat sat", "a b c d e", "", "x y", "one two three four"]
REFERENCES = ["the cat sat down", "b c e", "some words", "x y", "four three two one"]


def test_wer_agrees_with_jiwer() -> None:
    expected = 100.0 * jiwer.wer(REFERENCES, PREDICTIONS)
    assert compute_metrics(PREDICTIONS, REFERENCES, ["wer"])["wer"] == pytest.approx(expected)


def test_per_over_characters_agrees_with_jiwer() -> None:
    predictions, references = ["wlaked", "took  of", "ran"], ["walked", "took off", "ran"]
    expected = 100.0 * jiwer.cer(references, predictions)
    per = compute_metrics(predictions, references, ["per"])["per"]
    assert per == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        (["HH AH0 L OW1"], ["HH EH0 L OW1"], 25.0),
        (["K AE1 T", "EY1"], ["K AE1 T S", "OW1"], 100.0 * 2 / 5),
        (["took of", "ran", "went"], ["took off", "ran", "went"], 100.0 / 15),
        (["a b c d"], ["a"], 600.0),
        ([""], ["abcd"], 100.0),
        ([""], [""], 0.0),
        (["ab"], [""], 200.0),
    ],
    ids=["phones", "one-phone-word", "mostly-characters", "over-100", "empty", "both", "no-ref"],
)
def test_phone_error_rate(predictions: list[str], references: list[str], expected: float) -> None:
    per = compute_metrics(predictions, references, ["per"])["per"]
    assert per == pytest.approx(expected)


def test_error_rates_weigh_pairs_by_their_length() -> None:
    assert compute_metrics(["x", "a b c"], ["y", "a b c"], ["wer"])["wer"] == 25.0


@pytest.mark.parametrize(
    ("predictions", "expected"), [(["a", "b"], 100.0), (["a", "B"], 50.0), (["a ", "b."], 0.0)]
)
def test_exact_match_is_exact(predictions: list[str], expected: float) -> None:
    assert compute_metrics(predictions, ["a", "b"], ["exact_match"]) == {"exact_match": expected}


def test_rouge_lsum_splits_sentences() -> None:
    """rougeLsum equalled rougeL, up to ten points low, because texts held no line breaks."""
    reference, reversed_pair = "the cat sat there. dogs ran.", "dogs ran. the cat sat there."
    assert one("rougeL", reversed_pair, reference) == pytest.approx(66.67, abs=0.01)
    assert one("rougeLsum", reversed_pair, reference) == pytest.approx(100.0)
    without_ends = "dogs ran the cat sat there", "the cat sat there dogs ran"
    assert one("rougeLsum", *without_ends) == pytest.approx(66.67, abs=0.01)
    with_breaks = "dogs ran\nthe cat sat there", "the cat sat there\ndogs ran"
    assert one("rougeLsum", *with_breaks) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two!  Three? four", ["One.", "Two!", "Three?", "four"]),
        ("Version 1.5 of foo.bar", ["Version 1.5 of foo.bar"]),
        ("\u4e00\u3002\u4e8c\uff01", ["\u4e00\u3002", "\u4e8c\uff01", ""]),
        ("", [""]),
    ],
    ids=["latin", "no-space", "wide", "empty"],
)
def test_sentences_end_at_full_stops(text: str, expected: list[str]) -> None:
    assert split_sentences(text).split("\n") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\u00dcber  den Fl\u00fcssen!", ["\u00fcber", "den", "fl\u00fcssen"]),
        ("e\u0301te\u0301", ["\u00e9t\u00e9"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", ["\u0939\u093f\u0928\u094d\u0926\u0940"]),
        (
            "\u041f\u0440\u0438\u0432\u0435\u0442, 2 x",
            ["\u043f\u0440\u0438\u0432\u0435\u0442", "2", "x"],
        ),
    ],
    ids=["german", "decomposed", "vowel-signs", "cyrillic"],
)
def test_words_of_any_script_are_kept(text: str, words: list[str]) -> None:
    """rouge_score's tokenizer drops every letter outside ASCII, so scores were 0 or too high."""
    assert UnicodeTokenizer().tokenize(text) == words
    assert one("rouge1", text, text) == 100.0


@given(st.text(st.characters(max_codepoint=127)), st.text(st.characters(max_codepoint=127)))
def test_rouge_of_ascii_is_rouge_scores_own(prediction: str, reference: str) -> None:
    own = RougeScorer(["rouge1", "rouge2", "rougeL"]).score(reference, prediction)
    scores = compute_metrics([prediction], [reference], ["rouge1", "rouge2", "rougeL"])
    assert scores == pytest.approx({name: 100.0 * s.fmeasure for name, s in own.items()})


def test_perfect_predictions_score_100_and_no_errors() -> None:
    texts = ["the quick brown fox jumps.", "over the lazy dog today."]
    scores = compute_metrics(texts, texts, METRIC_NAMES)
    errors = {"per", "wer"}
    assert list(scores) == list(METRIC_NAMES)
    assert scores == pytest.approx({name: 0.0 if name in errors else 100.0 for name in scores})


def test_empty_predictions_score_0() -> None:
    scores = compute_metrics(["", ""], ["one two", "three four"], METRIC_NAMES)
    errors = {"per", "wer"}
    assert scores == pytest.approx({name: 100.0 if name in errors else 0.0 for name in scores})


def test_empty_references_give_numbers() -> None:
    scores = compute_metrics(["", "some text"], ["", ""], METRIC_NAMES)
    assert all(score == score for score in scores.values())


def test_signatures_say_how_scores_were_computed() -> None:
    signatures = metric_signatures(["exact_match", "bleu", "chrf", "rouge1"])
    assert list(signatures) == ["bleu", "chrf", "rouge1"]
    assert "nrefs:1|case:mixed" in signatures["bleu"]
    assert "tok:13a" in signatures["bleu"]
    assert "nw:0" in signatures["chrf"]
    assert "tok:unicode" in signatures["rouge1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], ["a", "b"], ["bleu"]), "1 predictions for 2 references"),
        (([], [], ["bleu"]), "no predictions to score"),
        ((["a"], ["a"], ["rougel"]), "'rougel' is not a metric; did you mean 'rougeL'?"),
        ((["a"], ["a"], ["zzz"]), "'zzz' is not a metric; choose among exact_match"),
        ((["a"], ["a"], ["loss"]), "'loss' is not a metric"),
    ],
    ids=["lengths", "empty", "near", "far", "loss"],
)
def test_wrong_arguments_are_named(arguments: tuple[list[str], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        compute_metrics(*arguments)
