"""English inflection, `walk[VBD]` -> `walked`, from the package lemminflect."""

import csv
import gzip
import io
from collections.abc import Iterator

from sparseformer.data.pairs import Pair, PairDataset, make_dataset, split_by_group
from sparseformer.data.sources.packages import package_folder
from sparseformer.errors import DataError

# Word class -> Penn tags of the columns that follow it in the table.
TAGS = {
    "noun": ("NNS",),
    "verb": ("VBD", "VBN", "VBG", "VBZ"),
    "adj": ("JJR", "JJS"),
    "adv": ("RBR", "RBS"),
}
SYMBOLS = tuple(f"[{tag}]" for tags in TAGS.values() for tag in tags)


def load_inflection() -> PairDataset:
    """Load the inflection task of English: 45,048 forms, split by lemma.

    The table is SPECIALIST's, as lemminflect 0.2.3 ships it. A column that is empty gives no pair
    (a noun without a plural, a verb whose participle equals its past); of several spellings the
    first one counts.

    Returns:
        40,491 training, 2,307 validation and 2,250 test pairs.

    Raises:
        ConfigError: If lemminflect isn't installed.
        DataError: If its table has another layout.
    """
    path = package_folder("lemminflect", "inflection") / "resources" / "infl_lu.csv.gz"
    try:
        table = gzip.decompress(path.read_bytes()).decode()
        pairs = list(_read_pairs(table))
    except (OSError, EOFError, ValueError, LookupError) as error:
        raise DataError(
            f"{path} isn't the table that lemminflect 0.2.3 ships ({error}): install that version."
        ) from error
    return make_dataset(
        "inflection",
        split_by_group(pairs, lambda pair: pair.src.rpartition("[")[0]),
        symbols=SYMBOLS,
        baseline="suffix_rule",
    )


def _read_pairs(table: str) -> Iterator[Pair]:
    for lemma, word_class, *columns in csv.reader(io.StringIO(table)):
        for tag, spellings in zip(TAGS[word_class], columns, strict=False):
            if spellings:
                yield Pair(f"{lemma}[{tag}]", spellings.split("/")[0])
