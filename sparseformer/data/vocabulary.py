"""Train the three kinds of vocabulary, so that the same texts give the same file in any process."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparseformer.config import TokenizerKind
from sparseformer.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_PARALLELISM = "TOKENIZERS_PARALLELISM"
# What WhitespaceSplit leaves together: Unicode's White_Space, which is less than Python's \s.
_WORD = re.compile(r"[^\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")


@contextmanager
def one_thread_unless_chosen() -> Iterator[None]:
    """Keep `tokenizers` from starting threads, which hang in processes forked later.

    The user's own TOKENIZERS_PARALLELISM wins.
    """
    if _PARALLELISM in os.environ:
        yield
        return
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[_PARALLELISM]


def train(
    texts: Iterable[str], kind: TokenizerKind, vocab_size: int, symbols: tuple[str, ...]
) -> "Tokenizer":
    """Train a vocabulary of one kind; see `Tokenizer.train`."""
    if kind == "char":
        tokenizer = _train_char(texts, vocab_size, symbols)
    elif kind == "word":
        tokenizer = _train_word(texts, vocab_size)
    else:
        tokenizer = _train_bpe(texts, vocab_size)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _train_char(texts: Iterable[str], vocab_size: int, symbols: tuple[str, ...]) -> "Tokenizer":
    from tokenizers import Regex
    from tokenizers.decoders import Fuse
    from tokenizers.pre_tokenizers import Split

    if reserved := set(symbols) & set(SPECIAL_TOKENS):
        raise ConfigError(f"The symbol {min(reserved)} is a special token: choose another name.")
    # A longer symbol goes first, so that one that begins with another is still found.
    names = [re.escape(symbol) for symbol in sorted(symbols, key=lambda s: (-len(s), s))]
    pattern = "|".join((*names, r"[\s\S]"))
    whole = re.compile(pattern)
    counts = Counter[str]()
    for text in texts:
        counts.update(whole.findall(text))
    tokenizer = _word_level(counts, vocab_size, first=symbols)
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = Fuse()
    return tokenizer


def _train_word(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    from tokenizers.pre_tokenizers import WhitespaceSplit

    counts = Counter[str]()
    for text in texts:
        counts.update(_WORD.findall(text))
    tokenizer = _word_level(counts, vocab_size, first=())
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def _word_level(counts: Counter[str], vocab_size: int, first: Sequence[str]) -> "Tokenizer":
    """Number special tokens, then `first`, then the most frequent tokens; ties by code point."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    reserved = dict.fromkeys((*SPECIAL_TOKENS, *first))
    if len(reserved) > vocab_size:
        raise ConfigError(
            f"data.vocab_size is {vocab_size}, but the special tokens and symbols alone are "
            f"{len(reserved)}: raise it."
        )
    ranked = sorted(counts.keys() - reserved.keys(), key=lambda token: (-counts[token], token))
    kept = [*reserved, *ranked][:vocab_size]
    vocab = {token: number for number, token in enumerate(kept)}
    return Tokenizer(WordLevel(vocab, unk_token="<unk>"))


def _train_bpe(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    alphabet = ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise ConfigError(
            f"data.vocab_size is {vocab_size}, but bpe needs {smallest} or more: "
            f"{len(alphabet)} bytes and {len(SPECIAL_TOKENS)} special tokens."
        )
    tokenizer = Tokenizer(BPE())
    # Its pattern splits "<pad>" into three, so no merge can spell a special token.
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
