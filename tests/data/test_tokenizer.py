"""Tokenizers: exact round trips, no control tokens from text, the same file in any process."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseformer.config import DataConfig, TokenizerKind
from sparseformer.data import Pair, Tokenizer, build_tokenizer
from sparseformer.data.pairs import Splits, make_dataset
from sparseformer.errors import CheckpointError, ConfigError

TEXTS = ["abc abd", "hug pug pun bun", "walk[VBD]", "a  b\n", "[D"]
SYMBOLS = ("[VBD]", "<doc>", "<doc>s")
KINDS: tuple[TokenizerKind, ...] = ("char", "word", "bpe")


def _train(kind: TokenizerKind, texts: list[str] = TEXTS, vocab_size: int = 300) -> Tokenizer:
    return Tokenizer.train(texts, kind, vocab_size, SYMBOLS)


BPE = _train("bpe")
CHAR = _train("char")


@given(st.text())
@settings(deadline=None, max_examples=100)
def test_bpe_gives_back_any_text(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("abc \u00e9\u4f60\U0001f600", id="unseen-scripts"),
        pytest.param("abc <doc> abd", id="symbol-between-spaces"),
        pytest.param("abc </s> <pad><eos>", id="special-names"),
        pytest.param(" \t\r\n\x85\u2028\x00 ", id="white-space"),
    ],
)
def test_bpe_trained_on_ascii_gives_back_other_text(text: str) -> None:
    """Byte-level BPE without the full alphabet drops what training didn't show."""
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.unk_id not in BPE.encode(text)


@given(st.lists(st.sampled_from(["a", "b", " ", "\n", "[VBD]", "<doc>", "<doc>s", "[", "D"])))
@settings(deadline=None, max_examples=100)
def test_char_gives_back_seen_characters_and_symbols(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert CHAR.decode(CHAR.encode(text)) == text


def test_char_neither_adds_nor_drops_spaces() -> None:
    """Added tokens used to lose or gain spaces on decoding."""
    tokenizer = Tokenizer.train(["abc abd"], "char", 50, ("<doc>",))
    ids = tokenizer.encode("abc <doc>  abd ")
    assert tokenizer.decode(ids) == "abc <doc>  abd "
    assert tokenizer.tokens(ids).count("<doc>") == 1


def test_char_keeps_the_longest_symbol_whole() -> None:
    assert CHAR.tokens(CHAR.encode("walk[VBD]")) == ["w", "a", "l", "k", "[VBD]"]
    assert CHAR.tokens(CHAR.encode("<doc>s<doc>")) == ["<doc>s", "<doc>"]


def test_word_splits_at_white_space_and_joins_with_spaces() -> None:
    tokenizer = Tokenizer.train(["HH AH0 L OW1", "L OW1"], "word", 10)
    ids = tokenizer.encode(" HH  OW1\tL ")
    assert tokenizer.tokens(ids) == ["HH", "OW1", "L"]
    assert tokenizer.decode(ids) == "HH OW1 L"


def test_word_counts_what_it_will_see() -> None:
    """Python's split takes U+001F for white space, the tokenizer doesn't."""
    tokenizer = Tokenizer.train(["a\x1fb"], "word", 10)
    assert tokenizer.tokens(tokenizer.encode("a\x1fb")) == ["a\x1fb"]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_unknown_text_leaves_a_trace(kind: TokenizerKind) -> None:
    tokenizer = Tokenizer.train(["h u g"], kind, 50)
    ids = tokenizer.encode("h \U0001f600 g")
    assert tokenizer.tokens(ids).count("<unk>") == 1
    assert tokenizer.unk_id in ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["<pad>", "<bos>", "<eos>"])
def test_text_never_becomes_a_control_token(kind: TokenizerKind, name: str) -> None:
    """`</s>` in a user's text used to end the sequence; a word tokenizer finds it as a word."""
    tokenizer = _train(kind, [*TEXTS, *[f"abc {name} abd"] * 50], vocab_size=400)
    control = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
    for text in (name, f"abc {name} abd", f"{name}{name}"):
        assert control.isdisjoint(tokenizer.encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_changes_nothing(kind: TokenizerKind, tmp_path: Path) -> None:
    """encode_special_tokens isn't stored in the file, so loading has to set it."""
    tokenizer = _train(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = "abc <eos> [VBD] hug"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.content_hash == tokenizer.content_hash
    assert (loaded.pad_id, loaded.bos_id, loaded.eos_id, loaded.unk_id) == (0, 1, 2, 3)
    loaded.save(tmp_path / "again.json")
    first, second = (tmp_path / name for name in ("tokenizer.json", "again.json"))
    assert first.read_bytes() == second.read_bytes()


def test_another_vocabulary_has_another_hash() -> None:
    assert _train("char").content_hash != Tokenizer.train(["xyz"], "char", 300).content_hash


def _run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)


def test_training_gives_the_same_file_in_every_process() -> None:
    code = (
        "from sparseformer.data.tokenizer import Tokenizer\n"
        "texts = [f'{i % 7} word{i % 13} thing {i * i % 11}' for i in range(300)]\n"
        "hashes = [Tokenizer.train(texts, k, 400).content_hash for k in ('char', 'word', 'bpe')]\n"
    )
    here: dict[str, list[str]] = {}
    exec(code, here)
    env = {"PYTHONHASHSEED": "2", "TOKENIZERS_PARALLELISM": "true"}
    assert _run(f"{code}print(*hashes)", env).stdout.split() == here["hashes"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_forking_after_encoding_neither_warns_nor_hangs() -> None:
    """A fork after parallel encoding printed a warning, and map with several processes hung.

    tokenizers 0.23 no longer warns, so the threads that a fork would lose are counted too.
    """
    code = (
        "import os\n"
        "from sparseformer.data.tokenizer import Tokenizer\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "tokenizer = Tokenizer.train(['abc abd'] * 100, 'bpe', 300)\n"
        "tokenizer.encode_batch(['abc'] * 1000)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(len(tokenizer.encode_batch(['abd'] * 50)))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = _run(code, {})
    assert done.stdout.split() == ["0", "50"]
    assert done.stderr == ""


def test_the_users_own_choice_of_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    CHAR.encode("abc")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    CHAR.encode("abc")
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_decoding_leaves_out_ignored_labels_and_special_tokens() -> None:
    """Labels padded with -100 used to raise OverflowError in the metrics."""
    ids = [CHAR.bos_id, *CHAR.encode("bun"), CHAR.eos_id, -100, CHAR.pad_id, -100]
    assert CHAR.decode(ids) == "bun"


@pytest.mark.parametrize("token_id", [-100, 10_000])
def test_displaying_an_id_without_a_token_raises(token_id: int) -> None:
    with pytest.raises(ValueError, match=str(token_id)):
        CHAR.tokens([token_id])


@pytest.mark.parametrize(
    ("kind", "vocab_size", "symbols", "message"),
    [
        pytest.param("bpe", 259, (), "259, but bpe needs 260", id="bytes"),
        pytest.param("char", 6, ("[A]", "[B]", "[C]"), "6, but .* alone are 7", id="symbols"),
        pytest.param("char", 50, ("<eos>",), "<eos> is a special token", id="reserved"),
    ],
)
def test_impossible_vocabularies_are_refused(
    kind: TokenizerKind, vocab_size: int, symbols: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.train(["abc"], kind, vocab_size, symbols)


def test_vocabulary_keeps_the_most_frequent_tokens_within_its_size() -> None:
    tokenizer = Tokenizer.train(["a a a b b c"], "word", 6)
    assert tokenizer.vocab_size == 6
    assert tokenizer.tokens(range(6)) == ["<pad>", "<bos>", "<eos>", "<unk>", "a", "b"]


def test_build_tokenizer_knows_the_prefix_and_both_sides() -> None:
    dataset = make_dataset("x", Splits([Pair("ab", "yz")], [], []))
    tokenizer = build_tokenizer(DataConfig(source_prefix="Q: ", tokenizer="char"), dataset)
    assert tokenizer.unk_id not in tokenizer.encode("Q: abyz")


def test_build_tokenizer_loads_the_file_it_is_given(tmp_path: Path) -> None:
    CHAR.save(tmp_path / "t.json")
    config = DataConfig(tokenizer_file=str(tmp_path / "t.json"))
    tokenizer = build_tokenizer(config, make_dataset("x", Splits([], [], [])))
    assert tokenizer.content_hash == CHAR.content_hash


def test_a_disk_that_refuses_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ended the run in a traceback of OSError; it left no half a file, and must not."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    CHAR.save(tmp_path / "t.json")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"Can't write .*t\.json: No space left .*; free some"
    ):
        BPE.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").content_hash == CHAR.content_hash
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    """Clearing up the temporary file raised NotADirectoryError over the error it should say."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Can't write .*t\.json: Not a directory"):
        CHAR.save(tmp_path / "file" / "t.json")
