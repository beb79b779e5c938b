"""tokenizer.json files made elsewhere: T5-like, BART-like, and some that can't be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from sparseformer.data import Tokenizer
from sparseformer.errors import ConfigError


def _t5(tmp_path: Path) -> Path:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581ab", "\u2581", "<", "/", "s", ">", "a", "b"]
    vocab = [(piece, 0.0 if i < 3 else -2.0 - i) for i, piece in enumerate(pieces)]
    inner = Inner(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_0>"])
    inner.enable_truncation(2)
    inner.enable_padding(length=5)
    path = tmp_path / "t5.json"
    inner.save(str(path))
    return path


def _bart(tmp_path: Path) -> Path:
    names = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Inner(models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    path = tmp_path / "bart.json"
    inner.save(str(path))
    return path


def test_t5_starts_outputs_with_its_pad_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_t5(tmp_path))
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.bos_id) == (0, 1, 2, 0)
    assert tokenizer.vocab_size == 12


def test_truncation_and_padding_of_the_file_are_turned_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_t5(tmp_path))
    assert tokenizer.tokens(tokenizer.encode("ab ab ab")) == ["\u2581ab"] * 3
    assert tokenizer.decode(tokenizer.encode("ab ab ab")) == "ab ab ab"


@pytest.mark.parametrize("text", ["</s>", "ab </s>", "<pad>", "<extra_id_0> ab"])
def test_a_unigram_piece_named_like_a_control_token_is_not_one(tmp_path: Path, text: str) -> None:
    """A Unigram model holds `</s>` as a piece, so that turning added tokens off isn't enough."""
    tokenizer = Tokenizer.load(_t5(tmp_path))
    assert {tokenizer.pad_id, tokenizer.eos_id, 11}.isdisjoint(tokenizer.encode(text))


def test_bart_names_are_found_and_any_text_comes_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_bart(tmp_path))
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.decode(tokenizer.encode("na\u00efve </s>")) == "na\u00efve </s>"


def _edit(path: Path, **model: Any) -> Path:
    layout = json.loads(path.read_text())
    layout["model"].update(model)
    path.write_text(json.dumps(layout))
    return path


def test_bpe_that_drops_unknown_characters_is_refused(tmp_path: Path) -> None:
    """BPE without unk and without all bytes leaves out an emoji without a trace."""
    path = _bart(tmp_path)
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "u": 4, "g": 5}
    with pytest.raises(ConfigError, match="drops unknown characters"):
        Tokenizer.load(_edit(path, vocab=vocab))
    tokenizer = Tokenizer.load(_edit(path, vocab=vocab, unk_token="<unk>"))
    assert tokenizer.tokens(tokenizer.encode("ug\U0001f600"))[:2] == ["u", "g"]
    assert tokenizer.unk_id in tokenizer.encode("ug\U0001f600")


@pytest.mark.parametrize("role", ["pad", "eos", "unk"])
def test_a_missing_control_token_is_named(tmp_path: Path, role: str) -> None:
    names = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    text = _bart(tmp_path).read_text().replace(f'"{names[role]}"', '"other"')
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ConfigError, match=f"odd.json has no {role} token: add one of <"):
        Tokenizer.load(tmp_path / "odd.json")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[1, 2]", id="array"),
        pytest.param(b'{"model": {"type": "Nonsense"}}', id="unknown-model"),
        pytest.param(b"\xff\xfe", id="not-utf8"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.json isn't a tokenizer\.json"):
        Tokenizer.load(tmp_path / "x.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json can't be read"):
        Tokenizer.load(tmp_path / "no.json")


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = _bart(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Tokenizer.load(path).pad_id == 1
