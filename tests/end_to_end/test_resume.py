"""A run that was interrupted anywhere ends bit for bit like one that was not."""

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sparseformer.cli import main
from sparseformer.training.trainer import Trainer

STEPS = [
    "--train.steps", "20", "--train.eval-every", "10", "--train.save-every", "6",
    "--train.log-every", "3", "--data.max-train-rows", "37", "--data.batch-tokens", "80",
    "--data.max-eval-rows", "40", "--model.dropout", "0.1", "--model.attention-dropout", "0.1",
    "--attn", "entmax_adaptive", "--loss", "sparse_topk",
]  # fmt: skip


def _train(arguments: list[str], runs: Path) -> int:
    return main(["train", *arguments, *STEPS, "--name", "run", "--runs-dir", str(runs)])


def _interrupt_at(steps: set[int], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal inside each of these steps, once."""
    original = Trainer._backward
    left = set(steps)

    def backward(self: Trainer, batches):  # type: ignore[no-untyped-def]
        if self.progress.step in left:
            left.remove(self.progress.step)
            os.kill(os.getpid(), number)
        return original(self, batches)

    monkeypatch.setattr(Trainer, "_backward", backward)


def _losses(run: Path) -> list[tuple[int, str]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], float(r["loss"]).hex()) for r in records if "grad_norm" in r]


def _assert_equal_runs(first: Path, second: Path) -> None:
    checkpoint = Path("checkpoints/step-0000020")
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = load_file(first / checkpoint / name), load_file(second / checkpoint / name)
        assert one.keys() == two.keys()
        different = [key for key in one if one[key].numpy().tobytes() != two[key].numpy().tobytes()]
        assert not different
    assert _losses(first) == _losses(second)
    one, two = (json.loads((run / "results.json").read_text()) for run in (first, second))
    assert one["test"] == two["test"]
    assert one["alpha"] == two["alpha"]


@pytest.fixture
def uninterrupted(copy_tiny: list[str], tmp_path: Path) -> Path:
    assert _train(copy_tiny, tmp_path / "whole") == 0
    return tmp_path / "whole" / "run"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_stops_in_mid_epoch_and_at_its_boundary(
    number: int,
    code: int,
    uninterrupted: Path,
    copy_tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _interrupt_at({6, 7, 9, 14}, number, monkeypatch)
    runs = tmp_path / "stopped"
    codes = []
    while not codes or codes[-1] != 0:
        codes.append(_train(copy_tiny, runs))
        assert len(codes) < 9
    assert codes == [code] * 4 + [0]
    assert "the same command goes on from here" in capsys.readouterr().out
    _assert_equal_runs(uninterrupted, runs / "run")


def test_stop_inside_a_validation(
    uninterrupted: Path, copy_tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Trainer.validate, []

    def validate(self: Trainer, log):  # type: ignore[no-untyped-def]
        calls.append(self.progress.step)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, log)

    monkeypatch.setattr(Trainer, "validate", validate)
    runs = tmp_path / "stopped"
    assert [_train(copy_tiny, runs), _train(copy_tiny, runs)] == [143, 0]
    assert calls == [10, 10, 20]
    _assert_equal_runs(uninterrupted, runs / "run")


def test_damaged_newest_checkpoint_falls_back_and_ends_the_same(
    uninterrupted: Path,
    copy_tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _interrupt_at({13}, signal.SIGTERM, monkeypatch)
    runs = tmp_path / "stopped"
    assert _train(copy_tiny, runs) == 143
    model = runs / "run/checkpoints/step-0000014/model.safetensors"
    content = bytearray(model.read_bytes())
    content[-5] ^= 0xFF
    model.write_bytes(content)
    assert _train(copy_tiny, runs) == 0
    assert "corrupt-step-0000014" in capsys.readouterr().out
    _assert_equal_runs(uninterrupted, runs / "run")


def test_all_checkpoints_damaged_is_refused(
    uninterrupted: Path, copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for manifest in uninterrupted.glob("checkpoints/*/MANIFEST.json"):
        manifest.unlink()
    assert _train(copy_tiny, uninterrupted.parent) == 5
    assert "--allow-fresh" in capsys.readouterr().err


def test_finished_run_says_so_and_changes_nothing(
    uninterrupted: Path, copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (uninterrupted / "results.json").read_bytes()
    assert _train(copy_tiny, uninterrupted.parent) == 0
    assert "already at step 20 of 20" in capsys.readouterr().out
    assert (uninterrupted / "results.json").read_bytes() == before


def test_other_settings_on_resume_are_listed(
    uninterrupted: Path, copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*copy_tiny, *STEPS, "--optim.lr", "0.001", "--train.steps", "24"]
    assert main(["train", *more, "--name", "run", "--runs-dir", str(uninterrupted.parent)]) == 0
    printed = capsys.readouterr().out
    assert "changed optim.lr: 0.005 in the checkpoint, 0.001 now" in printed
    assert "resumed at step 20 of 24" in printed
    assert "lr = 0.001" in (uninterrupted / "config.toml").read_text()


def test_finished_run_keeps_its_settings_and_is_evaluated_again_where_they_say(
    uninterrupted: Path, copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """config.toml named a loss that the weights were not trained with; new metrics were ignored."""
    arguments = [*copy_tiny, "--optim.lr", "0.001", "--metrics", "exact_match", "per"]
    assert _train(arguments, uninterrupted.parent) == 0
    assert "ignored optim.lr" in capsys.readouterr().out
    assert "lr = 0.005" in (uninterrupted / "config.toml").read_text()
    assert "per" in json.loads((uninterrupted / "results.json").read_text())["test"]


def test_another_metric_on_resume_starts_the_search_for_the_best_again(
    uninterrupted: Path, copy_tiny: list[str]
) -> None:
    """A loss was compared with the best exact match, so that no later checkpoint could win."""
    more = [*copy_tiny, *STEPS, "--train.steps", "24", "--train.metric", "loss"]
    assert main(["train", *more, "--name", "run", "--runs-dir", str(uninterrupted.parent)]) == 0
    best = json.loads((uninterrupted / "best.json").read_text())
    assert (best["step"], best["metric"]) == (24, "loss")


def test_fewer_rows_on_resume_start_the_next_epoch(copy_tiny: list[str]) -> None:
    """The saved position lay behind the end of the shorter epoch: IndexError."""
    run = [*copy_tiny, "--name", "run", "--data.batch-tokens", "80", "--train.eval-every", "90"]
    assert main(["train", *run, "--train.steps", "12", "--data.max-train-rows", "200"]) == 0
    fewer = ["--data.max-train-rows", "9", "--allow-changed-data", "--train.steps", "14"]
    assert main(["train", *run, *fewer]) == 0


def test_other_data_or_tokenizer_on_resume_is_refused(
    uninterrupted: Path, copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fewer_rows = [*copy_tiny, *STEPS, "--data.max-train-rows", "30"]
    again = ["--name", "run", "--runs-dir", str(uninterrupted.parent)]
    assert main(["train", *fewer_rows, *again]) == 4
    assert "--allow-changed-data" in capsys.readouterr().err
    tokenizer = uninterrupted / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"A"', 1))
    assert _train(copy_tiny, uninterrupted.parent) == 5
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_refused_resume_leaves_the_run_as_it_was(
    uninterrupted: Path, copy_tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (uninterrupted / "config.toml").read_bytes()
    assert _train([*copy_tiny, "--model.ffn-dim", "96"], uninterrupted.parent) == 5
    assert "doesn't fit the model" in capsys.readouterr().err
    assert (uninterrupted / "config.toml").read_bytes() == before


def test_two_runs_in_one_folder_are_refused(
    copy_tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparseformer.training.checkpoint import lock_run

    folder = tmp_path / "busy" / "run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    with lock_run(folder):
        assert _train(copy_tiny, folder.parent) == 2
    assert str(os.getpid()) in capsys.readouterr().err
