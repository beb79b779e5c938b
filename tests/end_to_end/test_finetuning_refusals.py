"""What can't be fine-tuned or exported ends in one sentence with the right exit code."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from published import LANGUAGE_FLAGS, SPARSE, Start

from sparseformer.cli import main


def _refused(
    argv: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()  # what transformers printed when a fixture saved the checkpoint
    assert main(argv) == code
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.count("\n") == 1, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("family", "extra", "words"),
    [
        ("t5", ["--train.freeze", "encodr"], ["encodr", "encoder", "all_but_alpha"]),
        ("t5", ["--train.freeze", "all_but_alpha"], ["nothing to train", "entmax_adaptive"]),
        ("t5", ["--data.source-lang", "en_XX"], ["source_lang", "mBART", "source-prefix"]),
        ("t5", ["--optim.alpha-end", "1.5"], ["optim.alpha_end", "entmax"]),
        ("t5", ["--model.alpha", "1.0", *SPARSE], ["model.alpha", "1.0", "1.001"]),
        ("bart", ["--data.max-source-length", "30"], ["max_positions", "24", "30"]),
        ("bart", ["--data.max-target-length", "2"], ["max_target_length", "3 or more"]),
        ("mbart", ["--data.target-lang", "german"], ["target_lang", "german", "de_DE"]),
    ],
    ids=[
        "part-that-is-none", "all-frozen", "language-for-t5", "ramp-without-entmax",
        "alpha-1-learned", "beyond-the-positions", "no-room-for-the-frame", "unknown-language",
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_checkpoint(
    family: str,
    extra: list[str],
    words: list[str],
    start: Callable[[str], Start],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = start(family).arguments("bad", *extra, "--runs-dir", str(tmp_path))
    _refused(arguments, 2, words, capsys)


def test_mbart_without_languages(
    start: Callable[[str], Start], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = start("mbart").arguments("bad", "--runs-dir", str(tmp_path))
    kept = [argument for argument in arguments if argument not in LANGUAGE_FLAGS]
    _refused(kept, 2, ["mBART", "data.source_lang"], capsys)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_checkpoint_without_a_file(
    file: str, start: Callable[[str], Start], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(start("t5").checkpoint, folder)
    (folder / file).unlink()
    arguments = start("t5").arguments("bad", "--runs-dir", str(tmp_path / "runs"))
    arguments[arguments.index("--init-from") + 1] = str(folder)
    _refused(arguments, 5, [file], capsys)


def test_run_whose_kept_settings_are_damaged(
    tuned: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tuned.runs / "run", run)
    (run / "pretrained/config.json").write_text("{")
    _refused(["evaluate", str(run)], 5, ["pretrained/config.json"], capsys)


def test_export_refuses_a_full_folder_and_a_run_of_ours(
    tuned: Start, copy_tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("precious")
    export = ["export", str(tuned.runs / "run"), "--to"]
    _refused([*export, str(tmp_path / "full")], 2, ["full", "--to"], capsys)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    _refused(export[:2], 2, ["to"], capsys)
    small = ["--train.steps", "1", "--data.max-eval-rows", "5", "--name", "own"]
    assert main(["train", *copy_tiny, *small]) == 0
    capsys.readouterr()
    own = str(tmp_path / "runs/own")
    _refused(["export", own, "--to", str(tmp_path / "new")], 2, ["own", "published"], capsys)
    assert not (tmp_path / "new").exists()
