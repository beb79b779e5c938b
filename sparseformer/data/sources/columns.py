"""Turn rows with columns into pairs, and count the rows that can't be used."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sparseformer.config import DataConfig
from sparseformer.data.pairs import Pair, Rejection, RejectionLog, describe_rejections
from sparseformer.data.sources.readers import Row
from sparseformer.errors import DataError


class Collected(NamedTuple):
    """The pairs of one file or split, and what was left out."""

    pairs: list[Pair]
    rejected: dict[str, Rejection]


def collect_pairs(rows: Sequence[Row], origin: str, config: DataConfig) -> Collected:
    """Take the text columns of every row that has both, and count the other rows by reason.

    A row is left out when a value is missing, isn't text, is only white space or isn't valid
    Unicode. A column `translation` that holds an object, `{"translation": {"en": ..., "de": ...}}`,
    stands for the columns in it.

    Args:
        rows: Rows of one file or split, at least one.
        origin: Its name, for errors and places.
        config: source_column, target_column and max_bad_share.

    Raises:
        DataError: If a column doesn't exist, or too many rows can't be used.
    """
    log = RejectionLog()
    readable: list[Row] = []
    for row in rows:
        if row.problem:
            log.add(row.problem, f"{origin}:{row.line}")
        else:
            readable.append(row._replace(columns=_translations(row.columns)))
    pairs = _take_texts(readable, origin, config, log) if readable else []
    rejected = log.summary()
    _check_share(rejected, len(rows), origin, config.max_bad_share)
    return Collected(pairs, rejected)


def _take_texts(
    rows: Sequence[Row], origin: str, config: DataConfig, log: RejectionLog
) -> list[Pair]:
    source, target = _choose_columns(rows, origin, config)
    pairs: list[Pair] = []
    for row in rows:
        src, tgt = row.columns.get(source), row.columns.get(target)
        problem = _problem(source, src) or _problem(target, tgt)
        if problem:
            log.add(problem, f"{origin}:{row.line}")
        else:
            pairs.append(Pair(str(src), str(tgt)))
    return pairs


def _translations(columns: Mapping[str, object]) -> Mapping[str, object]:
    inner = columns.get("translation")
    return inner if isinstance(inner, dict) else columns


def _choose_columns(rows: Iterable[Row], origin: str, config: DataConfig) -> tuple[str, str]:
    """Return the source and the target column: as configured, else the first and the second one."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    listed = ", ".join(names)
    chosen = []
    for role, wanted, position in (
        ("source", config.source_column, 0),
        ("target", config.target_column, 1),
    ):
        if wanted is not None and wanted not in names:
            raise DataError(
                f"{origin} has no column {wanted!r}: set data.{role}_column to one of {listed}."
            )
        if wanted is None and len(names) <= position:
            raise DataError(
                f"{origin} needs two columns, source and target, but has only: {listed}."
            )
        chosen.append(names[position] if wanted is None else wanted)
    source, target = chosen
    if source == target:
        raise DataError(
            f"Source and target are both the column {source!r} of {origin}: set data.source_column "
            f"and data.target_column to two of {listed}."
        )
    return source, target


def _problem(name: str, value: object) -> str:
    """Say why a value can't be used, or nothing."""
    if value is None:
        return f"no value in column {name}"
    if not isinstance(value, str):
        return f"not text but {type(value).__name__} in column {name}"
    if not value.strip():
        return f"empty text in column {name}"
    return "" if _is_unicode(value) else f"not valid Unicode in column {name}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_share(
    rejected: Mapping[str, Rejection], num_rows: int, origin: str, max_bad_share: float
) -> None:
    bad = sum(rejection.count for rejection in rejected.values())
    if bad == num_rows:
        raise DataError(
            f"None of the {num_rows:,} rows of {origin} can be used; mend them: "
            f"{describe_rejections(rejected)}."
        )
    if bad > max_bad_share * num_rows:
        raise DataError(
            f"{bad:,} of {num_rows:,} rows of {origin} can't be used, which is more than "
            f"data.max_bad_share = {max_bad_share}; mend them or raise it: "
            f"{describe_rejections(rejected)}."
        )
