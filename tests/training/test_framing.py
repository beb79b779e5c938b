"""What stands around a text for each family of checkpoints, and what is asked of its outputs."""

from types import SimpleNamespace
from typing import Any

import pytest

from sparseformer.config import Config, DataConfig
from sparseformer.data import Pair, Tokenizer
from sparseformer.errors import ConfigError
from sparseformer.generation import Constraints
from sparseformer.training.framing import Framing, encode_split, make_framing, settle_start


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c d e f <s> en_XX de_DE"], "word", 30)


def _published(family: str, **changes: Any) -> Any:
    """Return the fields of PretrainedSettings that a framing reads."""
    asked = Constraints(forced_bos_id=7, forced_eos_id=2, suppressed_ids=(0,), min_length=56)
    fields = {"family": family, "eos_id": 2, "start_id": 2, "vocab_size": 40, "generation": asked}
    return SimpleNamespace(**(fields | changes))


def _config(**data: Any) -> Config:
    return Config(data=DataConfig(**data))


LANGUAGES = {"source_lang": "en_XX", "target_lang": "de_DE"}


def test_own_models_and_t5_have_nothing_around_a_text(tokenizer: Tokenizer) -> None:
    assert make_framing(_config(), tokenizer, None) == Framing()
    t5 = make_framing(_config(), tokenizer, _published("t5", start_id=0))
    assert (t5.before_source, t5.after_source, t5.before_target) == ((), (), ())
    assert t5.start_id == 0


def test_rows_without_a_token_are_forbidden_and_the_shortest_length_is_dropped(
    tokenizer: Tokenizer,
) -> None:
    framing = make_framing(_config(), tokenizer, _published("pegasus"))
    assert framing.forbidden_ids == tuple(range(tokenizer.vocab_size, 40))
    asked = Constraints(forced_bos_id=7, forced_eos_id=2, suppressed_ids=(0,))
    assert framing.constraints == asked


def test_bart_has_its_first_token_on_both_sides(tokenizer: Tokenizer) -> None:
    framing = make_framing(_config(), tokenizer, _published("bart"))
    first = tokenizer.token_id("<s>")
    assert framing.before_source == framing.before_target == (first,)
    assert framing.after_source == ()


def test_mbart_50_has_languages_in_front(tokenizer: Tokenizer) -> None:
    framing = make_framing(_config(**LANGUAGES), tokenizer, _published("mbart"))
    assert framing.before_source == (tokenizer.token_id("en_XX"),)
    assert framing.before_target == (tokenizer.token_id("de_DE"),)
    assert framing.constraints.forced_bos_id == tokenizer.token_id("de_DE")
    assert framing.start_id == 2


def test_mbart_25_has_the_source_language_behind_and_starts_with_the_target_language(
    tokenizer: Tokenizer,
) -> None:
    published = _published("mbart", start_id=35)
    framing = make_framing(_config(**LANGUAGES), tokenizer, published)
    assert framing.after_source == (tokenizer.token_id("en_XX"),)
    assert framing.before_source == framing.before_target == ()
    assert framing.constraints.forced_bos_id is None
    assert framing.start_id == tokenizer.token_id("de_DE")


@pytest.mark.parametrize(
    ("family", "data", "words"),
    [
        ("mbart", {"source_lang": "en_XX"}, "data.target_lang"),
        ("mbart", {**LANGUAGES, "source_lang": "xx"}, "'xx'"),
        ("marian", LANGUAGES, "source-prefix"),
        ("bart", {"max_source_length": 2}, "data.max_source_length"),
    ],
    ids=["no-target", "unknown", "not-mbart", "too-short"],
)
def test_what_does_not_fit_is_refused_by_name(
    family: str, data: dict[str, Any], words: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_framing(_config(**data), tokenizer, _published(family))


def test_languages_are_refused_for_a_model_of_ours(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="source_lang"):
        make_framing(_config(source_lang="en_XX"), tokenizer, None)


def test_frames_count_within_the_lengths_and_survive_a_cut(tokenizer: Tokenizer) -> None:
    framing = Framing(before_source=(8,), after_source=(9,), before_target=(7,))
    data = DataConfig(max_source_length=5, max_target_length=4)
    pair = Pair("a b c d e f", "a b c d e f")
    encoded = encode_split([pair], tokenizer, data, framing)
    a, b = tokenizer.encode("a b")
    assert encoded.src == [[8, a, b, tokenizer.eos_id, 9]]
    assert encoded.tgt == [[7, a, b, tokenizer.eos_id]]
    assert (encoded.truncated_src, encoded.truncated_tgt) == (1, 1)


def test_only_a_checkpoint_changes_the_first_input_of_the_decoder(tokenizer: Tokenizer) -> None:
    settle_start(tokenizer, Framing())
    assert tokenizer.bos_id == 1
    settle_start(tokenizer, Framing(start_id=0))
    assert tokenizer.bos_id == 0
