"""The user's own files: text byte for byte, bad rows counted, errors that name file and line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sparseformer.config import DataConfig
from sparseformer.data import Pair, PairDataset, Rejection, load_dataset
from sparseformer.data.pairs import shared_sources
from sparseformer.data.sources.columns import collect_pairs
from sparseformer.data.sources.readers import read_parallel, read_rows
from sparseformer.errors import ConfigError, DataError

ANY = 1.0


def _collect(
    path: Path, share: float = 0.0, **columns: Any
) -> tuple[list[Pair], dict[str, Rejection]]:
    config = DataConfig(source="files", max_bad_share=share, **columns)
    return collect_pairs(read_rows(path), path.name, config)


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _jsonl(path: Path, *rows: object) -> Path:
    return _write(path, "".join(json.dumps(row) + "\n" for row in rows))


ODD_TEXTS = [
    pytest.param("001", id="leading-zeros"),
    pytest.param("1e5", id="exponent"),
    pytest.param("NA", id="not-available"),
    pytest.param("true", id="boolean"),
    pytest.param("2020-01-01", id="date"),
    pytest.param(' "a" ', id="quotes-and-spaces"),
    pytest.param("a\rb\x85c\u2028d\x0be", id="line-separators"),
    pytest.param("\u00e9e\u0301\U0001f600", id="not-normalised"),
]


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_text_stays_what_it_is(tmp_path: Path, suffix: str, text: str) -> None:
    """Loaders that infer types turn 001 into 1.0 and 1e5 into 100000.0."""
    path = tmp_path / f"x.{suffix}"
    if suffix == "jsonl":
        _jsonl(path, {"src": text, "tgt": "t"})
    elif suffix == "csv":
        quoted = text.replace('"', '""')
        _write(path, f'src,tgt\n"{quoted}",t\n')
    elif suffix == "tsv":
        _write(path, f"src\ttgt\n{text}\tt\n")
    else:
        parquet.write_table(pa.table({"src": [text], "tgt": ["t"]}), path)
    assert _collect(path) == ([Pair(text, "t")], {})


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv"])
def test_byte_order_mark_and_line_ends_are_no_text(tmp_path: Path, suffix: str, end: str) -> None:
    lines = {
        "jsonl": ['{"src": "a", "tgt": "b"}', '{"src": "c", "tgt": "d"}'],
        "csv": ["src,tgt", "a,b", "c,d"],
        "tsv": ["src\ttgt", "a\tb", "c\td"],
    }[suffix]
    path = _write(tmp_path / f"x.{suffix}", "\ufeff" + end.join(lines) + end)
    assert _collect(path, source_column="src") == ([Pair("a", "b"), Pair("c", "d")], {})


def test_quoted_line_ends_stay_text(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.csv", 'src,tgt\r\n"a\r\nb","c\nd"\r\ne,f\r\n')
    assert _collect(path)[0] == [Pair("a\r\nb", "c\nd"), Pair("e", "f")]


def test_a_row_with_extra_columns_is_named_and_costs_itself_only(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.csv", "src,tgt\na,b\nc,d,e\nf,g\n")
    with pytest.raises(DataError, match=r"1 of 3 rows of x\.csv .*\(x\.csv:3\)"):
        _collect(path, share=0.3)
    pairs, rejected = _collect(path, share=0.4)
    assert pairs == [Pair("a", "b"), Pair("f", "g")]
    assert rejected == {"wrong number of columns": Rejection(1, ("x.csv:3",))}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param('"c,d', id="never-closed"),
        pytest.param('"c"d,e', id="text-after-quote"),
        pytest.param("c\rd,e", id="bare-carriage-return"),
    ],
)
def test_a_bad_line_of_csv_costs_one_row(tmp_path: Path, bad: str) -> None:
    """A lone quote used to swallow every row up to the end of the file."""
    good = "".join(f"s{i},t{i}\n" for i in range(50))
    path = _write(tmp_path / "x.csv", f"src,tgt\na,b\n{bad}\n{good}")
    pairs, rejected = _collect(path, share=0.05)
    assert len(pairs) == 51
    assert rejected == {"not valid CSV": Rejection(1, ("x.csv:3",))}


def test_null_and_other_types_are_counted_and_never_converted(tmp_path: Path) -> None:
    """Chunks of nulls broke the inferred schema, and a declared one turned 5 into text."""
    rows: list[object] = [{"src": "a", "tgt": None}] * 30
    path = _jsonl(tmp_path / "x.jsonl", *rows, {"src": "a", "tgt": "b"}, {"src": 5, "tgt": "b"})
    pairs, rejected = _collect(path, share=ANY)
    assert pairs == [Pair("a", "b")]
    assert rejected == {
        "no value in column tgt": Rejection(30, ("x.jsonl:1", "x.jsonl:2", "x.jsonl:3")),
        "not text but int in column src": Rejection(1, ("x.jsonl:32",)),
    }


BAD_LINES = {
    "not valid JSON": b'{"src": "a", "tgt": ',
    "not a JSON object": b'["a", "b"]',
    "no value in column tgt": b'{"src": "a"}',
    "not text but list in column tgt": b'{"src": "a", "tgt": ["b"]}',
    "empty text in column tgt": b'{"src": "a", "tgt": " \\n"}',
    "not valid Unicode in column src": b'{"src": "\\ud800", "tgt": "b"}',
    "not valid Unicode in column tgt": b'{"src": "a", "tgt": "\xff"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_bad_rows_are_counted_by_reason_with_their_lines(tmp_path: Path, reason: str) -> None:
    good = b'{"src": "a", "tgt": "b"}'
    lines = [good] * 20
    for number in (3, 8, 11, 19):
        lines[number - 1] = BAD_LINES[reason]
    path = _write(tmp_path / "x.jsonl", b"\n".join(lines) + b"\n")
    pairs, rejected = _collect(path, share=0.2)
    assert len(pairs) == 16
    assert rejected == {reason: Rejection(4, ("x.jsonl:3", "x.jsonl:8", "x.jsonl:11"))}
    with pytest.raises(DataError, match=r"4 of 20 rows .* data.max_bad_share = 0.19") as caught:
        _collect(path, share=0.19)
    assert f"4 {reason} (x.jsonl:3, x.jsonl:8, x.jsonl:11)" in str(caught.value)


def test_a_file_of_bad_rows_only_is_refused_whatever_the_share(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.jsonl", "{\n{\n")
    with pytest.raises(DataError, match=r"None of the 2 rows .* 2 not valid JSON \(x\.jsonl:1"):
        _collect(path, share=ANY)


def test_deeply_nested_json_is_a_bad_row(tmp_path: Path) -> None:
    nested = b"[" * 100_000 + b"]" * 100_000
    path = _write(tmp_path / "x.jsonl", b'{"src": "a", "tgt": "b"}\n' + nested + b"\n")
    assert _collect(path, share=ANY)[1] == {"not valid JSON": Rejection(1, ("x.jsonl:2",))}


def test_columns_are_chosen_by_name_or_by_position(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "x.jsonl", {"a": "1", "b": "2", "c": "3"})
    assert _collect(path)[0] == [Pair("1", "2")]
    assert _collect(path, source_column="c")[0] == [Pair("3", "2")]
    assert _collect(path, source_column="b", target_column="a")[0] == [Pair("2", "1")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param({"source_column": "x"}, "no column 'x': .* one of a, b", id="source"),
        pytest.param({"target_column": "x"}, "no column 'x': .* one of a, b", id="target"),
        pytest.param({"source_column": "b"}, "both the column 'b' .* two of a, b", id="same"),
    ],
)
def test_a_wrong_column_lists_the_columns(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    path = _jsonl(tmp_path / "x.jsonl", {"a": "1", "b": "2"})
    with pytest.raises(DataError, match=message):
        _collect(path, **columns)


def test_translation_objects_have_languages_for_columns(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "x.json", {"id": "7", "translation": {"en": "yes", "de": "ja"}})
    assert _collect(path, source_column="de", target_column="en")[0] == [Pair("ja", "yes")]
    assert _collect(path)[0] == [Pair("yes", "ja")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("x.csv", "", "no rows in .*x.csv", id="empty-csv"),
        pytest.param("x.csv", "src,tgt\n", "no rows in .*x.csv", id="header-only"),
        pytest.param("x.jsonl", "\n\n", "no rows in .*x.jsonl", id="blank-lines"),
        pytest.param("x.parquet", "", "no rows in .*x.parquet", id="empty-parquet"),
        pytest.param("x.parquet", "PAR1", "x.parquet isn't a whole parquet", id="cut-parquet"),
        pytest.param("x.csv", "a,a\n1,2\n", "isn't a header", id="name-twice"),
        pytest.param("x.csv", "text\nab\n", "two columns, .* only: text", id="one-column"),
        pytest.param("x.xml", "<a/>", "none of the suffixes .jsonl, .json, .csv", id="suffix"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _collect(_write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content", "sign"),
    [
        pytest.param("x.csv", "src,tgt\na,b\n".encode("utf-16"), "mark of UTF-16", id="csv"),
        pytest.param("x.tsv", "\ufeffs\tt\n".encode("utf-16-be"), "mark of UTF-16", id="tsv"),
        pytest.param("x.jsonl", '{"a": "b"}\n'.encode("utf-16-le"), "line 1 holds", id="no-mark"),
        pytest.param("x.csv", b"src,tgt\na,b\0\n", "line 2 holds a NUL", id="nul"),
    ],
)
def test_other_encodings_are_named(tmp_path: Path, name: str, content: bytes, sign: str) -> None:
    """A file saved by a spreadsheet as UTF-16 became columns of NUL characters, or no columns."""
    with pytest.raises(
        DataError, match=rf"x\..* isn't UTF-8 text \(.*{sign}.*\): save it as UTF-8"
    ):
        _collect(_write(tmp_path / name, content))


def test_parallel_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    """Lines of UTF-16 became pairs, and training went on with them."""
    src, tgt = _write(tmp_path / "x.en", "a\n"), _write(tmp_path / "x.de", "A\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"x\.de isn't UTF-8 text"):
        read_parallel(src, tgt)


@pytest.mark.parametrize(
    ("name", "converted"), [("my x.json", r"my x\.jsonl'"), ("x.jsonl", r"x\.lines\.jsonl")]
)
def test_an_array_of_json_is_told_from_json_lines(
    tmp_path: Path, name: str, converted: str
) -> None:
    """An indented array was `not valid JSON` on every line, without a way out."""
    path = _write(tmp_path / name, '\n [\n {"src": "a", "tgt": "b"}\n]\n')
    with pytest.raises(
        DataError, match=rf"one object per line: .* jq -c '\.\[\]' .* > .*{converted}"
    ):
        _collect(path, share=ANY)


def test_parallel_text_keeps_its_rows_together(tmp_path: Path) -> None:
    src = _write(tmp_path / "x.en", "\ufeffa\x85b\n\u2028c\n\nlast\r\n")
    tgt = _write(tmp_path / "x.de", "A\nB\nC\nD")
    rows = read_parallel(src, tgt)
    assert [(row.columns["source"], row.columns["target"]) for row in rows] == [
        ("a\x85b", "A"),
        ("\u2028c", "B"),
        ("", "C"),
        ("last", "D"),
    ]


def test_parallel_text_of_unequal_length_is_refused(tmp_path: Path) -> None:
    src, tgt = _write(tmp_path / "x.en", "a\nb\n"), _write(tmp_path / "x.de", "A\n")
    with pytest.raises(DataError, match=r"x\.en has 2 lines, but .*x\.de has 1"):
        read_parallel(src, tgt)


def _load(**settings: Any) -> PairDataset:
    return load_dataset(DataConfig(source="files", **settings), seed=1)


def test_missing_splits_are_held_out_without_shared_sources(tmp_path: Path) -> None:
    rows = [{"src": f"s{i % 60}", "tgt": f"t{i}"} for i in range(120)]
    dataset = _load(train_file=str(_jsonl(tmp_path / "train.jsonl", *rows)))
    assert len(dataset.train) + len(dataset.validation) + len(dataset.test) == 120
    assert len(dataset.validation) >= 2
    assert len(dataset.test) >= 2
    assert not any(shared_sources(dataset).values())


def test_given_splits_are_used_as_they_are(tmp_path: Path) -> None:
    files = {
        f"{split}_file": str(_jsonl(tmp_path / f"{split}.jsonl", {"src": split, "tgt": "t"}))
        for split in ("train", "validation", "test")
    }
    dataset = _load(**files)
    assert [part[0].src for part in (dataset.train, dataset.validation, dataset.test)] == [
        "train",
        "validation",
        "test",
    ]


def test_parallel_files_are_loaded_by_split(tmp_path: Path) -> None:
    files = {}
    for split in ("train", "validation", "test"):
        files[f"{split}_file"] = str(_write(tmp_path / f"{split}.en", f"{split}\n"))
        files[f"{split}_target_file"] = str(_write(tmp_path / f"{split}.de", "ja\n"))
    assert list(_load(**files).test) == [Pair("test", "ja")]


def test_added_rows_change_the_content_hash(tmp_path: Path) -> None:
    """A run must be able to refuse data that changed since its checkpoint."""
    path = tmp_path / "train.csv"
    rows = "".join(f"s{i},t{i}\n" for i in range(30))
    before = _load(train_file=str(_write(path, f"src,tgt\n{rows}"))).content_hash
    assert _load(train_file=str(path)).content_hash == before
    after = _load(train_file=str(_write(path, f"src,tgt\n{rows}new,row\n"))).content_hash
    assert after != before


def test_row_limits_keep_the_first_rows_and_change_the_hash(tmp_path: Path) -> None:
    rows = [{"src": f"s{i}", "tgt": "t"} for i in range(100)]
    path = str(_jsonl(tmp_path / "train.jsonl", *rows))
    whole, part = _load(train_file=path), _load(train_file=path, max_train_rows=7, max_eval_rows=2)
    assert list(part.train) == list(whole.train[:7])
    assert (len(part.validation), len(part.test)) == (2, 2)
    assert part.content_hash != whole.content_hash


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"train_file": "t.csv", "train_target_file": "t.de"},
            r"data.train_file is the table t.csv, .* two plain text files", id="csv"),
        pytest.param({"train_file": "t.en", "train_target_file": "t.JSON"},
            r"data.train_target_file is the table t.JSON", id="json-target"),
        pytest.param({"train_file": "t.csv", "validation_target_file": "v.de"},
            "data.validation_target_file needs data.validation_file", id="validation-alone"),
        pytest.param({"train_file": "t.csv", "test_target_file": "v.de"},
            "data.test_target_file needs data.test_file", id="test-alone"),
        pytest.param({"train_file": "t.en", "train_target_file": "t.de", "source_column": "a"},
            "data.source_column .* parallel text has none", id="source-column"),
        pytest.param({"train_file": "t.en", "train_target_file": "t.de", "target_column": "a"},
            "data.target_column .* parallel text has none", id="target-column"),
    ],
)  # fmt: skip
def test_options_that_parallel_text_cannot_use_are_named(
    given: dict[str, str], message: str
) -> None:
    """Tables were read as lines of text, and the other options were ignored in silence."""
    with pytest.raises(ConfigError, match=message):
        _load(**given)


def test_columns_may_belong_to_a_table_beside_parallel_text(tmp_path: Path) -> None:
    dataset = _load(
        train_file=str(_write(tmp_path / "t.en", "a\nb\n")),
        train_target_file=str(_write(tmp_path / "t.de", "A\nB\n")),
        test_file=str(_jsonl(tmp_path / "t.jsonl", {"x": "1", "y": "2"})),
        source_column="y",
        target_column="x",
    )
    assert list(dataset.test) == [Pair("2", "1")]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        pytest.param({}, ConfigError, "needs data.train_file", id="no-file"),
        pytest.param(
            {"train_file": "/no/x.csv"}, DataError, "/no/x.csv can't be read", id="missing"
        ),
        pytest.param(
            {"hub_name": "x"}, ConfigError, "data.hub_name is for the source hub", id="hub"
        ),
        pytest.param({"translate": "de"}, ConfigError, "for the source debian", id="translate"),
    ],
)
def test_wrong_settings_are_named(
    settings: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _load(**settings)
