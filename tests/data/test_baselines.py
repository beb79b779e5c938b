"""Predictions without a network."""

import pytest

from sparseformer.config import DataConfig
from sparseformer.data import BaselineName, Pair, baseline_predictions, load_dataset
from sparseformer.data.baselines import apply_suffix_rules, first_sentence, learn_suffix_rules
from sparseformer.data.pairs import Splits, make_dataset

TRAIN = [
    Pair("carry[VBD]", "carried"),
    Pair("marry[VBD]", "married"),
    Pair("play[VBD]", "played"),
    Pair("walk[VBD]", "walked"),
    Pair("walk[VBZ]", "walks"),
    Pair("kiss[VBZ]", "kisses"),
    Pair("miss[VBZ]", "misses"),
]


@pytest.mark.parametrize(
    ("src", "form"),
    [
        pytest.param("tarry[VBD]", "tarried", id="longest-ending"),
        pytest.param("stay[VBD]", "stayed", id="vowel"),
        pytest.param("talk[VBZ]", "talks", id="other-tag"),
        pytest.param("hiss[VBZ]", "hisses", id="sibilant"),
        pytest.param("walk[JJR]", "walk", id="unknown-tag"),
        pytest.param("x[VBD]", "xed", id="no-common-ending"),
    ],
)
def test_suffix_rules_inflect_by_the_longest_known_ending(src: str, form: str) -> None:
    assert apply_suffix_rules(learn_suffix_rules(TRAIN), src) == form


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("One. Two.", "One."),
        ("Is it? Yes.", "Is it?"),
        ("No end", "No end"),
        ("Version 1.2 works. Next", "Version 1.2 works."),
        ("", ""),
    ],
)
def test_lead_1_takes_the_first_sentence(text: str, first: str) -> None:
    assert first_sentence(text) == first


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("lead_1", ["tarry[VBD]"]), ("suffix_rule", ["tarried"]), (None, None)],
)
def test_a_data_set_names_its_baseline(
    baseline: BaselineName | None, expected: list[str] | None
) -> None:
    dataset = make_dataset("x", Splits(TRAIN, [], [Pair("tarry[VBD]", "?")]), baseline=baseline)
    assert baseline_predictions(dataset) == expected


def test_suffix_rules_get_most_forms_of_unseen_lemmas_right() -> None:
    dataset = load_dataset(DataConfig(), seed=1)
    predictions = baseline_predictions(dataset)
    assert predictions is not None
    right = sum(p == pair.tgt for p, pair in zip(predictions, dataset.test, strict=True))
    assert 0.85 < right / len(predictions) < 0.86
