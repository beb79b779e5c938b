"""metrics.jsonl holds each step once as valid JSON, and the terminal shows what happened."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.training.log import TrainLog, peak_memory_mib, read_metrics


def plain() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def write_steps(run_dir: Path, *steps: int, resume_step: int = 0) -> None:
    with TrainLog(run_dir, 10, console=plain(), resume_step=resume_step) as log:
        for step in steps:
            log.step({"step": step, "loss": step + 0.5})


def steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir)]


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    record = {"step": 20, "loss": 1.25, "lr": 1e-3, "alpha": {"cross": [[1.5, 1.25]]}}
    with TrainLog(tmp_path, 100, console=plain()) as log:
        log.step(record)
        log.validation(20, {"loss": 2.0, "per": 40.0}, is_best=True)
    validation = {"step": 20, "validation": {"loss": 2.0, "per": 40.0}, "is_best": True}
    assert read_metrics(tmp_path) == [record, validation]


def test_a_record_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    with TrainLog(tmp_path, 10, console=plain()) as log:
        log.step({"step": 1, "loss": 2.0})
        assert steps(tmp_path) == [1]


def test_non_finite_figures_are_valid_json_and_shown(tmp_path: Path) -> None:
    """A NaN loss was averaged away in the log, so that a broken run looked healthy."""
    console = plain()
    figures = {"loss": math.nan, "grad_norm": math.inf, "alpha": {"cross": [[-math.inf]]}}
    with TrainLog(tmp_path, 10, console=console) as log:
        log.step({"step": 3, **figures})
    line = (tmp_path / "metrics.jsonl").read_text()
    raw = json.loads(line, parse_constant=pytest.fail)
    assert raw == {
        "step": 3,
        "loss": "NaN",
        "grad_norm": "Infinity",
        "alpha": {"cross": [["-Infinity"]]},
    }
    (record,) = read_metrics(tmp_path)
    assert repr(record) == repr({"step": 3, **figures})
    assert "loss nan  grad_norm inf" in shown(console)


def test_resuming_drops_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 2, 4, 6, 8)
    write_steps(tmp_path, 5, 6, resume_step=4)
    assert steps(tmp_path) == [2, 4, 5, 6]


def test_a_run_from_step_zero_starts_an_empty_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 2, 4)
    write_steps(tmp_path, 1)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(
    "torn",
    ['{"step": 3, "lo', '{"step": 2, "loss": 1.0}', "\x00\x00\x00", '"text"\n'],
    ids=["half a record", "no line end", "zero bytes", "no record"],
)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    """The first record after a crash was glued to half a line."""
    write_steps(tmp_path, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write_steps(tmp_path, 3, resume_step=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_reading_leaves_out_a_torn_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert steps(tmp_path) == [1]
    path.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(CheckpointError, match="line 1 isn't a record"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "new") == []


def test_without_a_terminal_each_record_is_one_plain_line(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=20)
    with TrainLog(tmp_path, 1000, console=console) as log:
        log.step({"step": 20, "loss": 3.21043, "tokens_per_second": 123456.7, "alpha": {}})
        log.validation(20, {"loss": 0.5, "[red]": 1.0}, is_best=True)
        log.validation(20, {"loss": 0.75}, is_best=False)
    assert shown(console).splitlines() == [
        "step 20/1000  loss 3.21  tokens/s 123457",
        "validation at step 20  loss 0.5  [red] 1  *",
        "validation at step 20  loss 0.75",
    ]


def test_on_a_terminal_a_bar_starts_at_the_resumed_step(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with TrainLog(tmp_path, 100, console=console, resume_step=40) as log:
        log.step({"step": 60, "loss": 2.5})
        log.validation(60, {"loss": 0.5}, is_best=False)
    text = shown(console)
    assert " 40/100" in text
    assert " 60/100" in text
    assert "loss 2.5" in text
    assert "validation at step 60" in text


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing/metrics\.jsonl needs 0 bytes and failed"):
        TrainLog(tmp_path / "missing", 10, console=plain())


def test_missing_tensorboard_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "sparseformer\[tensorboard\]"'):
        TrainLog(tmp_path, 10, console=plain(), tensorboard=True)


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TrainLog(tmp_path, 10, console=plain(), tensorboard=True) as log:
        log.step({"step": 5, "loss": 1.5, "alpha": {"cross": [[1.25, 1.75]]}})
        log.validation(5, {"per": 30.0}, is_best=True)
    assert scalars(tmp_path) == {
        "loss": [(5, 1.5)],
        "alpha/cross/0/0": [(5, 1.25)],
        "alpha/cross/0/1": [(5, 1.75)],
        "validation/per": [(5, 30.0)],
    }


def test_tensorboard_forgets_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resume_step, loss in ((0, 1.0), (5, 2.0)):
        with TrainLog(
            tmp_path, 10, console=plain(), tensorboard=True, resume_step=resume_step
        ) as log:
            for step in (4, 7, 9)[resume_step > 0 :]:
                log.step({"step": step, "loss": loss})
    assert scalars(tmp_path) == {"loss": [(4, 1.0), (7, 2.0), (9, 2.0)]}


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_peak_memory_is_the_largest_resident_set() -> None:
    status = Path("/proc/self/status").read_text()
    kibibytes = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_memory_mib(torch.device("cpu")) == pytest.approx(kibibytes / 1024, rel=0.05)
