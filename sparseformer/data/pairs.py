"""Pairs of texts, splits without leaks, the content hash, and the rows that were left out."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparseformer.errors import DataError

BaselineName = Literal["suffix_rule", "lead_1"]
SplitName = Literal["train", "validation", "test"]

# Percent of the groups of a built-in source, and of the rows of a file that comes alone.
TEST_PERCENT = 5
VALIDATION_PERCENT = 5
LINES_SHOWN = 3


class Pair(NamedTuple):
    """One training example: the text that goes in and the text that comes out."""

    src: str
    tgt: str


@dataclass(frozen=True)
class Rejection:
    """How many rows were left out for one reason, and where the first of them stand."""

    count: int
    first: tuple[str, ...]
    """FILE:LINE of the first three."""


class Splits(NamedTuple):
    """Training, validation and test pairs."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


@dataclass(frozen=True)
class PairDataset:
    """A named set of pairs in three splits."""

    name: str
    train: Sequence[Pair]
    validation: Sequence[Pair]
    test: Sequence[Pair]
    content_hash: str
    """sha256 of all pairs in order, hex."""
    symbols: tuple[str, ...] = ()
    """Symbols of several characters that the char tokenizer keeps whole."""
    rejected: Mapping[str, Rejection] = field(default_factory=dict)
    """Reason -> how many rows were left out for it, and the first line numbers."""
    baseline: BaselineName | None = None
    """The method without a network that predictions are compared with."""


class RejectionLog:
    """Count rejected rows by reason, and remember the first places of each."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        """Count one row that can't be used for `reason`; `place` is FILE:LINE."""
        self._rows[reason] = self._rows.get(reason, 0) + 1
        first = self._first.setdefault(reason, [])
        if len(first) < LINES_SHOWN:
            first.append(place)

    def summary(self) -> dict[str, Rejection]:
        """Return the counts by reason, the most frequent reason first."""
        reasons = sorted(self._rows, key=lambda reason: (-self._rows[reason], reason))
        return {r: Rejection(self._rows[r], tuple(self._first[r])) for r in reasons}


def describe_rejections(rejected: Mapping[str, Rejection]) -> str:
    """Write rejections on one line: `2 not valid JSON (a.jsonl:3, a.jsonl:8); 1 ...`."""
    return "; ".join(
        f"{rejection.count:,} {reason} ({', '.join(rejection.first)})"
        for reason, rejection in rejected.items()
    )


def merge_rejections(*parts: Mapping[str, Rejection]) -> dict[str, Rejection]:
    """Add up the rejections of several files."""
    merged: dict[str, Rejection] = {}
    for part in parts:
        for reason, rejection in part.items():
            before = merged.get(reason, Rejection(0, ()))
            first = (*before.first, *rejection.first)[:LINES_SHOWN]
            merged[reason] = Rejection(before.count + rejection.count, first)
    return merged


def content_hash(train: Iterable[Pair], validation: Iterable[Pair], test: Iterable[Pair]) -> str:
    """Hash all pairs in order, so that a run can tell that its data changed.

    Every text is preceded by its length in characters, so that no two data sets give the same
    bytes.

    Returns:
        The sha256 of all pairs, 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, pairs in (("train", train), ("validation", validation), ("test", test)):
        digest.update(f"{name}\n".encode())
        for src, tgt in pairs:
            digest.update(f"{len(src)} {len(tgt)} {src}{tgt}\n".encode())
    return digest.hexdigest()


def make_dataset(
    name: str,
    splits: Splits,
    *,
    symbols: tuple[str, ...] = (),
    rejected: Mapping[str, Rejection] | None = None,
    baseline: BaselineName | None = None,
) -> PairDataset:
    """Bundle splits and their content hash."""
    return PairDataset(
        name, *splits, content_hash(*splits), symbols, dict(rejected or {}), baseline
    )


def _digest(text: str) -> int:
    # md5 only spreads keys evenly here; nothing rests on it being hard to invert.
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest())


def split_of(group: str) -> SplitName:
    """Return the split that a group belongs to, by the md5 of its name modulo 100.

    5 % of the groups are test, 5 % validation. Adding groups never moves an old one.
    """
    bucket = _digest(group) % 100
    if bucket < TEST_PERCENT:
        return "test"
    return "validation" if bucket < TEST_PERCENT + VALIDATION_PERCENT else "train"


def split_by_group(pairs: Iterable[Pair], group_of: Callable[[Pair], str]) -> Splits:
    """Split so that no group and no source text stands on two sides.

    A source text that occurs in several groups goes with the first of them. Rows come in the order
    of a hash of their source, so that the first rows of a split are a fair sample of it.

    Args:
        pairs: All pairs.
        group_of: The lemma, word, package or distribution that a pair belongs to.
    """
    group: dict[str, str] = {}
    splits: dict[SplitName, list[Pair]] = {"train": [], "validation": [], "test": []}
    for pair in pairs:
        splits[split_of(group.setdefault(pair.src, group_of(pair)))].append(pair)
    for rows in splits.values():
        rows.sort(key=lambda pair: _digest(pair.src))
    return Splits(**splits)


def hold_out(pairs: Sequence[Pair], percent: int, purpose: str) -> tuple[list[Pair], list[Pair]]:
    """Split off `percent` of the distinct source texts, at least one, those with the smallest hash.

    Equal sources stay on one side, and both sides keep the order of the rows.

    Args:
        pairs: Rows in file order.
        percent: Share of the distinct sources to hold out, in (0, 100).
        purpose: What they are held out for, for the error: `validation` or `test`.

    Returns:
        The rows that stay, and the rows held out.

    Raises:
        DataError: If fewer than two distinct sources exist, so that one side would be empty.
    """
    sources = sorted({pair.src for pair in pairs}, key=lambda src: (_digest(src), src))
    if len(sources) < 2:
        raise DataError(
            f"{len(sources)} distinct training sources are too few to hold out {purpose} rows: "
            f"give data.{purpose}_file."
        )
    held = set(sources[: max(1, math.floor(len(sources) * percent / 100))])
    stay = [pair for pair in pairs if pair.src not in held]
    return stay, [pair for pair in pairs if pair.src in held]


def shared_inputs(dataset: PairDataset) -> int:
    """Count the distinct validation and test inputs that also stand in train.

    Such inputs make a score look better than it is. Built-in sources and held-out splits have none;
    files and splits that the user gives may.
    """
    train = {pair.src for pair in dataset.train}
    scored = {pair.src for pairs in (dataset.validation, dataset.test) for pair in pairs}
    return len(train & scored)


def shared_sources(dataset: PairDataset) -> dict[str, int]:
    """Count source texts that stand in two splits; all counts are 0 when nothing leaks.

    Returns:
        `{"train/validation": n, "train/test": n, "validation/test": n}`.
    """
    train, validation, test = (
        {pair.src for pair in pairs} for pairs in (dataset.train, dataset.validation, dataset.test)
    )
    return {
        "train/validation": len(train & validation),
        "train/test": len(train & test),
        "validation/test": len(validation & test),
    }
