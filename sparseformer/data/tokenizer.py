"""Tokenizers on Hugging Face's `tokenizers`: characters, words, byte-level BPE, or a given file."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseformer.config import DataConfig, TokenizerKind
from sparseformer.data import vocabulary
from sparseformer.data.cache import write_whole
from sparseformer.data.pairs import PairDataset
from sparseformer.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

IGNORED = -100

# The usual names of each role, most specific first.
_PAD_NAMES = ("<pad>", "[PAD]", "<PAD>", "<|pad|>")
_BOS_NAMES = ("<bos>", "<s>", "[CLS]", "[BOS]", "<|startoftext|>")
_EOS_NAMES = ("<eos>", "</s>", "[SEP]", "[EOS]", "<|endoftext|>")
_UNK_NAMES = ("<unk>", "[UNK]", "<UNK>", "<|unk|>")


class Tokenizer:
    """Turn text into token ids and back; text of a user never becomes a control token.

    Byte-level BPE gives back any text exactly, characters give back every text of characters seen
    in training, and words give back their text with single spaces.

    Attributes:
        pad_id: Fills up rows.
        bos_id: Starts every output; the pad id where the file has no such token, as for T5 and
            Marian.
        eos_id: Ends every input and output.
        unk_id: Stands for what the vocabulary lacks.
        vocab_size: The largest id plus one.
        content_hash: sha256 of tokenizer.json, 64 hexadecimal digits.
    """

    def __init__(self, serialized: bytes, origin: str) -> None:
        """Build a tokenizer from the bytes of a tokenizer.json.

        Args:
            serialized: The file's content.
            origin: The file's name, for errors.

        Raises:
            ConfigError: If it isn't a tokenizer, lacks a control token, or would drop unknown
                characters.
        """
        self._serialized = serialized
        self._inner = _parse(serialized, origin)
        # Neither is part of a text's encoding, but both may be stored in the file.
        self._inner.no_truncation()
        self._inner.no_padding()
        # Not stored in the file, so it has to be set at every load.
        self._inner.encode_special_tokens = True
        vocab = self._inner.get_vocab(with_added_tokens=True)
        self.pad_id = _find_control_token(vocab, "pad", _PAD_NAMES, origin)
        self.eos_id = _find_control_token(vocab, "eos", _EOS_NAMES, origin)
        self.unk_id = _find_control_token(vocab, "unk", _UNK_NAMES, origin)
        self.bos_id = next((vocab[name] for name in _BOS_NAMES if name in vocab), self.pad_id)
        self.vocab_size = max(vocab.values()) + 1
        self.content_hash = hashlib.sha256(serialized).hexdigest()
        added = self._inner.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        self._special = frozenset(special | {self.pad_id, self.bos_id, self.eos_id, self.unk_id})
        self._control = self._special - {self.unk_id}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a tokenizer.json, ours or one of T5, BART, Marian, mBART or BERT.

        Raises:
            ConfigError: If the file can't be read, isn't a tokenizer, has no token for padding, for
                the end or for unknown text under a usual name, or would drop unknown characters in
                silence.
        """
        try:
            serialized = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"The tokenizer file {path} can't be read ({error.strerror}): "
                "point data.tokenizer_file to a tokenizer.json."
            ) from error
        return cls(serialized, str(path))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        kind: TokenizerKind,
        vocab_size: int,
        symbols: Sequence[str] = (),
    ) -> "Tokenizer":
        """Train a tokenizer; the same texts give the same file in any process.

        The ids of <pad>, <bos>, <eos> and <unk> are 0, 1, 2 and 3.

        Args:
            texts: Inputs and outputs to learn the vocabulary from.
            kind: `char`, `word` (split at white space) or `bpe` (byte-level, with all 256 bytes).
            vocab_size: The largest vocabulary, special tokens included.
            symbols: Strings of several characters that `char` keeps whole; the other kinds don't
                use them.

        Raises:
            ConfigError: If vocab_size has no room for special tokens, symbols or bytes.
        """
        with vocabulary.one_thread_unless_chosen():
            inner = vocabulary.train(texts, kind, vocab_size, tuple(symbols))
        return cls(inner.to_str(pretty=True).encode(), f"a new {kind} tokenizer")

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, byte for byte what was loaded.

        Raises:
            CheckpointError: If the disk is full or refuses the file.
        """
        write_whole(Path(path), self._serialized)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens: `</s>` in a text is four characters."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        with vocabulary.one_thread_unless_chosen():
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._as_text(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens and -100 are left out."""
        kept = [i for i in ids if i != IGNORED and i not in self._special]
        return self._inner.decode(kept, skip_special_tokens=False)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return each id's token for display, special tokens included.

        Raises:
            ValueError: If an id has no token.
        """
        return [self._token(i) for i in ids]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, such as the language `en_XX`, or None when there is none."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def _token(self, token_id: int) -> str:
        token = self._inner.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise ValueError(
                f"Token id {token_id} has no token: ids run from 0 to {self.vocab_size - 1}."
            )
        return token

    def _as_text(self, ids: list[int]) -> list[int]:
        # A model that knows "</s>" as a word or a piece finds it in text too.
        if self._control.isdisjoint(ids):
            return ids
        return [self.unk_id if i in self._control else i for i in ids]


def build_tokenizer(config: DataConfig, dataset: PairDataset) -> Tokenizer:
    """Load data.tokenizer_file, or train a tokenizer on both sides of the training split.

    Raises:
        ConfigError: If the file or the vocabulary size can't be used.
    """
    if config.tokenizer_file is not None:
        return Tokenizer.load(config.tokenizer_file)
    texts = chain.from_iterable((config.source_prefix + src, tgt) for src, tgt in dataset.train)
    return Tokenizer.train(texts, config.tokenizer, config.vocab_size, dataset.symbols)


def _parse(serialized: bytes, origin: str) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Inner

    refusal = f"{origin} isn't a tokenizer.json of the tokenizers library."
    try:
        text = serialized.decode("utf-8-sig")
        layout = json.loads(text)
    except ValueError as error:
        raise ConfigError(refusal) from error
    if not isinstance(layout, dict) or not isinstance(layout.get("model"), dict):
        raise ConfigError(refusal)
    try:
        inner = Inner.from_str(text)
    except Exception as error:  # the library raises the bare class for a bad layout
        raise ConfigError(f"{refusal[:-1]}: {error}") from error
    _refuse_silent_drops(layout, inner, origin)
    return inner


def _refuse_silent_drops(
    layout: dict[str, Any], inner: "tokenizers.Tokenizer", origin: str
) -> None:
    """Refuse a model that leaves out what it doesn't know without a trace."""
    from tokenizers.pre_tokenizers import ByteLevel

    model = layout["model"]
    knows_unknown = model.get("unk_token") is not None or model.get("unk_id") is not None
    every_byte = set(ByteLevel.alphabet()) <= inner.get_vocab().keys()
    if not (knows_unknown or model.get("byte_fallback") or every_byte):
        raise ConfigError(
            f"{origin} drops unknown characters: its model needs unk_token, byte_fallback or all "
            "256 bytes."
        )


def _find_control_token(
    vocab: dict[str, int], role: str, names: tuple[str, ...], origin: str
) -> int:
    for name in names:
        if name in vocab:
            return vocab[name]
    raise ConfigError(f"{origin} has no {role} token: add one of {', '.join(names)}.")
