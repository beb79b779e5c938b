"""Read JSONL, CSV, TSV, parquet and parallel text, without changing text or guessing types."""

import codecs
import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from sparseformer.errors import DataError

# Characters; the limit also ends the search for the second half of a lone quote.
_LONGEST_CSV_FIELD = 10_000_000
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Row(NamedTuple):
    """One row as it stands in a file: its columns, or why it has none."""

    line: int
    """Counted from 1; parquet: the row's number."""
    columns: Mapping[str, object]
    problem: str = ""


def read_rows(path: Path) -> list[Row]:
    """Read a table by its suffix.

    JSONL has one object a line. CSV has a header, then RFC 4180 with double quotes, so that a row
    may span lines. TSV has a header, then fields between tabs, without quoting. Parquet gives its
    columns as they are. A byte order mark is no text; lines end at `\\n` or `\\r\\n` only; blank
    lines of JSONL, CSV and TSV are no rows.

    Raises:
        DataError: If the file is missing, empty, damaged, not UTF-8 text, or of another kind.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} has none of the suffixes {', '.join(_READERS)}: rename it, or give the other "
            "side of parallel text as data.train_target_file."
        )
    rows = reader(path)
    if not rows:
        raise DataError(f"There are no rows in {path}: give a file that has some.")
    return rows


def read_parallel(source: Path, target: Path) -> list[Row]:
    """Read two text files line by line; their rows have the columns `source` and `target`.

    Raises:
        DataError: If a file is missing or empty or isn't UTF-8 text, or one has more lines than the
            other.
    """
    source_lines, target_lines = _read_plain_lines(source), _read_plain_lines(target)
    if len(source_lines) != len(target_lines):
        raise DataError(
            f"{source} has {len(source_lines):,} lines, but {target} has {len(target_lines):,}: "
            "parallel text needs one line of each for every pair."
        )
    if not source_lines:
        raise DataError(f"There are no rows in {source}: give a file that has some.")
    pairs = zip(source_lines, target_lines, strict=True)
    return [Row(line, {"source": src, "target": tgt}) for line, (src, tgt) in enumerate(pairs, 1)]


def read_bytes(path: Path) -> bytes:
    """Read a file, or say in one sentence why not."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"The data file {path} can't be read ({error.strerror}): mend the path."
        ) from error


def _read_lines(path: Path) -> list[str]:
    """Split at line feeds only, so that `\\r`, U+0085 and U+2028 stay text.

    Bytes that aren't UTF-8 become lone surrogates, by which the row is rejected later.
    """
    content = read_bytes(path)
    _refuse_other_encodings(path, content)
    text = content.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def _refuse_other_encodings(path: Path, content: bytes) -> None:
    if content.startswith(_UTF16_MARKS):
        sign = "it begins with the mark of UTF-16"
    elif (position := content.find(b"\0")) >= 0:
        line = content.count(b"\n", 0, position) + 1
        sign = f"line {line:,} holds a NUL character"
    else:
        return
    raise DataError(f"{path} isn't UTF-8 text ({sign}): save it as UTF-8.")


def _read_plain_lines(path: Path) -> list[str]:
    """Read lines without their ends, `\n` or `\r\n`."""
    return [line.removesuffix("\r") for line in _read_lines(path)]


def _read_jsonl(path: Path) -> list[Row]:
    lines = [(number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip()]
    if lines and lines[0][1].lstrip().startswith("["):
        _refuse_array(path)
    return [_json_row(number, line) for number, line in lines]


def _refuse_array(path: Path) -> NoReturn:
    converted = path.with_suffix(".lines.jsonl" if path.suffix.lower() == ".jsonl" else ".jsonl")
    before, after = shlex.quote(str(path)), shlex.quote(str(converted))
    raise DataError(
        f"{path} begins with '[', but JSON Lines is wanted, one object per line: convert an array "
        f"of objects with jq -c '.[]' {before} > {after}"
    )


def _json_row(number: int, line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Row(number, {}, "not valid JSON")
    return Row(number, value) if isinstance(value, dict) else Row(number, {}, "not a JSON object")


def _read_csv(path: Path) -> list[Row]:
    before = csv.field_size_limit(_LONGEST_CSV_FIELD)
    try:
        return _with_header(path, _csv_records(_read_lines(path)))
    finally:
        csv.field_size_limit(before)


def _read_tsv(path: Path) -> list[Row]:
    lines = enumerate(_read_plain_lines(path), 1)
    return _with_header(path, ((number, line.split("\t"), "") for number, line in lines if line))


def _csv_records(lines: list[str]) -> Iterator[tuple[int, list[str], str]]:
    """Yield (line, fields, problem); after a bad line go on with the next line.

    One reader per record: a reader that fails has eaten every line up to there, and one odd quote
    would take many good rows with it.
    """
    start = 0
    while start < len(lines):
        following = (f"{lines[i]}\n" for i in range(start, len(lines)))
        reader = csv.reader(following, strict=True)
        try:
            fields, problem, used = next(reader), "", reader.line_num
        except csv.Error:
            fields, problem, used = [], "not valid CSV", 1
        if fields or problem:
            yield start + 1, fields, problem
        start += used


def _with_header(path: Path, records: Iterator[tuple[int, list[str], str]]) -> list[Row]:
    _, header, problem = next(records, (1, [], ""))
    if problem or len(set(header)) < len(header):
        raise DataError(
            f"The first line of {path} isn't a header: it needs one name per column, no name twice."
        )
    return [
        Row(line, dict(zip(header, fields, strict=True)))
        if len(fields) == len(header)
        else Row(line, {}, problem or "wrong number of columns")
        for line, fields, problem in records
    ]


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowInvalid, BufferReader, parquet

    content = read_bytes(path)
    if not content:
        return []
    try:
        table = parquet.read_table(BufferReader(content))
    except (ArrowInvalid, OSError) as error:
        raise DataError(f"{path} isn't a whole parquet file ({error}).") from error
    return [Row(number, columns) for number, columns in enumerate(table.to_pylist(), 1)]


_READERS: Mapping[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
TABLE_SUFFIXES = tuple(_READERS)
