"""What `sparseformer data SOURCE` prints: counts, lengths, hash, leaks, rows left out, examples."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparseformer.data.pairs import Pair, PairDataset, shared_sources

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

QUANTILES = (0.05, 0.5, 0.95, 1.0)
EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200
# Control characters steer the terminal, line separators and directions reorder what it shows, and
# lone surrogates can't be printed at all.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def describe(dataset: PairDataset) -> "Group":
    """Describe a data set for the terminal.

    Args:
        dataset: Any data set.

    Returns:
        A rich renderable: pairs per split, lengths in characters and words (5 %, median, 95 %,
        longest), content hash, rejected rows by reason, inputs that two splits share, and three
        pairs. Control characters of the data are shown as escapes.
    """
    from rich.console import Group
    from rich.text import Text

    total = len(dataset.train) + len(dataset.validation) + len(dataset.test)
    facts = [
        f"{dataset.name}: {total:,} pairs",
        f"content hash  {dataset.content_hash}",
        f"shared inputs {_leaks(dataset)}",
        *_rejections(dataset),
        f"baseline      {dataset.baseline or 'none'}",
    ]
    # Text, since `[VBD]` in a plain string would be taken for markup.
    return Group(
        Text("\n".join(_printable(fact) for fact in facts)),
        _lengths_table(dataset),
        Text("\n".join(_examples(dataset.train))),
    )


def _splits(dataset: PairDataset) -> dict[str, Sequence[Pair]]:
    return {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}


def _leaks(dataset: PairDataset) -> str:
    shared = {names: count for names, count in shared_sources(dataset).items() if count}
    if not shared:
        return "none: no input stands in two splits"
    return "LEAK: " + ", ".join(f"{count:,} in {names}" for names, count in shared.items())


def _rejections(dataset: PairDataset) -> list[str]:
    if not dataset.rejected:
        return ["left out      none"]
    return [
        f"left out      {rejection.count:,} {reason} ({', '.join(rejection.first)})"
        for reason, rejection in dataset.rejected.items()
    ]


def _lengths_table(dataset: PairDataset) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    table.add_column("pairs", justify="right")
    for side in ("source", "target"):
        for unit in ("characters", "words"):
            table.add_column(f"{side} {unit}\n5% 50% 95% max", justify="right")
    for name, pairs in _splits(dataset).items():
        table.add_row(name, f"{len(pairs):,}", *_lengths(pairs))
    return table


def _lengths(pairs: Sequence[Pair]) -> list[str]:
    cells = []
    for texts in ([pair.src for pair in pairs], [pair.tgt for pair in pairs]):
        cells.append(quantiles([len(text) for text in texts]))
        cells.append(quantiles([len(text.split()) for text in texts]))
    return cells


def quantiles(lengths: Sequence[int]) -> str:
    """Write the 5 %, 50 % and 95 % quantiles and the largest length; nothing for no rows."""
    if not lengths:
        return "-"
    values = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return " ".join(f"{int(value):,}" for value in values)


def _examples(pairs: Sequence[Pair]) -> list[str]:
    return [f"{_short(pair.src)}\n  -> {_short(pair.tgt)}" for pair in pairs[:EXAMPLES]]


def _short(text: str) -> str:
    if len(text) <= _EXAMPLE_CHARACTERS:
        return _printable(text)
    return f"{_printable(text[:_EXAMPLE_CHARACTERS].rstrip())} ..."


def _printable(text: str) -> str:
    r"""Write what a terminal would obey as an escape: `\x1b`, `\n`."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
