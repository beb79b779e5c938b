"""Package descriptions of Debian and Ubuntu: text -> synopsis, or English -> another language."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sparseformer.config import DataConfig
from sparseformer.data.cache import cache_folder
from sparseformer.data.pairs import Pair, PairDataset, make_dataset, split_by_group
from sparseformer.data.sources.apt import (
    cat,
    fetch_lists,
    package_files,
    paragraphs,
    translation_files,
)
from sparseformer.errors import ConfigError, DataError

SHORTEST_BODY = 10
SHORTEST_SYNOPSIS, LONGEST_SYNOPSIS = 3, 30


class Description(NamedTuple):
    """One package's description in one language, with single spaces."""

    synopsis: str
    paragraphs: tuple[str, ...]


# (package, md5 of the English description): the same key in every language.
Key = tuple[str, str]


def load_debian(config: DataConfig) -> PairDataset:
    """Load package descriptions, split by source package.

    Without data.translate: description (10 words or more) -> synopsis (3 to 30 words), about 59,600
    pairs of Debian bookworm. With it: synopses and paragraphs from English into that language,
    32,682 pairs for de.

    Raises:
        ConfigError: If the machine has no apt, or data.translate isn't a language code.
        DataError: If the lists can't be fetched, or hold nothing in that language.
    """
    language = config.translate or "en"
    if not re.fullmatch(r"[a-z]{2,3}(_[A-Z]{2})?", language) or config.translate == "en":
        raise ConfigError(
            f"data.translate is {language!r}, but it must be a code such as de or pt_BR."
        )
    lists = fetch_lists(cache_folder(config) / f"debian-{language}", language)
    return build_debian(lists, config.translate)


def build_debian(
    lists: Path, translate: str | None, read: Callable[[Path], str] = cat
) -> PairDataset:
    """Build the pairs from a folder of apt's lists.

    Args:
        lists: Files named *_Translation-LANGUAGE and *_Packages.
        translate: The target language, or None for summaries.
        read: Returns the text of a list.

    Raises:
        DataError: If no list holds descriptions in a language.
    """
    english = _read_language(lists, "en", read)
    if translate is None:
        pairs = summaries(english)
    else:
        pairs = translations(english, _read_language(lists, translate, read))
    source = _source_packages(read(path) for path in package_files(lists))
    group = {pair: source.get(package, package) for package, pair in pairs}
    splits = split_by_group(group, group.__getitem__)
    if translate is None:
        return make_dataset("debian", splits, baseline="lead_1")
    return make_dataset(f"debian en-{translate}", splits)


def summaries(english: Mapping[Key, Description]) -> list[tuple[str, Pair]]:
    """Return (package, description -> synopsis) of every distinct description of fair length."""
    found: dict[str, tuple[str, Pair]] = {}
    for (package, _), (synopsis, body) in english.items():
        text = " ".join(body)
        fair = SHORTEST_SYNOPSIS <= len(synopsis.split()) <= LONGEST_SYNOPSIS
        if fair and len(text.split()) >= SHORTEST_BODY:
            found.setdefault(text, (package, Pair(text, synopsis)))
    return list(found.values())


def translations(
    english: Mapping[Key, Description], other: Mapping[Key, Description]
) -> list[tuple[str, Pair]]:
    """Return (package, English -> other) of every distinct pair of synopses or paragraphs.

    Paragraphs are paired where both descriptions have as many; texts that were left in English are
    left out.
    """
    found: dict[Pair, str] = {}
    for key, translated in other.items():
        if key in english:
            for pair in _aligned(english[key], translated):
                if pair.src != pair.tgt:
                    found.setdefault(pair, key[0])
    return [(package, pair) for pair, package in found.items()]


def read_descriptions(text: str, language: str) -> Iterator[tuple[Key, Description]]:
    """Yield the descriptions of a Translation list."""
    for fields in paragraphs(text):
        body = fields.get(f"Description-{language}")
        if body is not None:
            yield (fields["Package"], fields["Description-md5"]), parse_description(body)


def parse_description(text: str) -> Description:
    """Split a description: the first line is the synopsis, a line with a dot ends a paragraph."""
    synopsis, *lines = text.split("\n")
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == ".":
            blocks.append([])
        else:
            blocks[-1] += line.split()
    return Description(
        " ".join(synopsis.split()), tuple(" ".join(words) for words in blocks if words)
    )


def _aligned(english: Description, other: Description) -> Iterator[Pair]:
    yield Pair(english.synopsis, other.synopsis)
    if len(english.paragraphs) == len(other.paragraphs):
        yield from map(Pair, english.paragraphs, other.paragraphs)


def _read_language(
    lists: Path, language: str, read: Callable[[Path], str]
) -> dict[Key, Description]:
    descriptions: dict[Key, Description] = {}
    for path in translation_files(lists, language):
        for key, description in read_descriptions(read(path), language):
            descriptions.setdefault(key, description)
    if not descriptions:
        raise DataError(
            f"apt's lists in {lists} hold no descriptions in {language!r}: "
            "choose another data.translate, such as de, fr or it."
        )
    return descriptions


def _source_packages(lists: Iterable[str]) -> dict[str, str]:
    """Map packages to source packages where the names differ; `Source: gcc-12 (12.2)` is gcc-12."""
    source: dict[str, str] = {}
    package = ""
    for text in lists:
        for line in text.split("\n"):
            if line.startswith("Package: "):
                package = line[9:]
            elif line.startswith("Source: "):
                source[package] = line[8:].partition(" ")[0]
    return source
