"""What a run reports while it trains: metrics.jsonl, the terminal, and TensorBoard on request."""

import json
import math
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.training.atomic import disk_error, write_atomic

METRICS = "metrics.jsonl"


class TrainLog:
    """Write each record to metrics.jsonl at once, and show its figures.

    On a terminal there is a progress bar with the last figures; elsewhere one plain line a record.
    JSON has no NaN and no infinity, so in metrics.jsonl these are the strings "NaN", "Infinity" and
    "-Infinity"; read_metrics turns them back into floats.

    Args:
        run_dir: the run folder; it exists.
        total_steps: optimiser steps of the whole run.
        console: where the figures are shown.
        tensorboard: also write event files to `run_dir/tensorboard`.
        resume_step: the run goes on after this step; later records of metrics.jsonl are dropped,
            as well as lines that a crash left torn, so that each step has its records once.

    Raises:
        CheckpointError: metrics.jsonl can't be written.
        ConfigError: tensorboard is asked for and not installed.
    """

    def __init__(
        self,
        run_dir: Path | str,
        total_steps: int,
        *,
        console: Console,
        tensorboard: bool = False,
        resume_step: int = 0,
    ) -> None:
        self._path = Path(run_dir) / METRICS
        self._total_steps = total_steps
        self._console = console
        self._events = _open_tensorboard(Path(run_dir), resume_step) if tensorboard else None
        self._file = _open_metrics(self._path, resume_step)
        self._bar = _progress_bar(console) if console.is_terminal else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total_steps, completed=resume_step)

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def step(self, record: Mapping[str, Any]) -> None:
        """Log a training step.

        Args:
            record: `step` and its figures: numbers, or lists and mappings of numbers. The numbers
                at the top level are shown, apart from memory and a count of zero skipped steps.
        """
        self._write(record)
        hidden = {"step", "memory_mib"}
        if not record.get("skipped_steps"):
            hidden.add("skipped_steps")
        text = _describe({key: value for key, value in record.items() if key not in hidden})
        if self._bar is None:
            self._print(f"step {record['step']}/{self._total_steps}  {text}")
        else:
            self._bar.update(self._task, completed=record["step"], description=text)

    def validation(self, step: int, figures: Mapping[str, float], *, is_best: bool) -> None:
        """Log the figures of a validation, and whether they are the best so far.

        Args:
            step: optimiser steps taken.
            figures: metric -> value.
            is_best: shown as a star.
        """
        self._write({"step": step, "validation": dict(figures), "is_best": is_best})
        star = "  *" if is_best else ""
        self._print(f"validation at step {step}  {_describe(figures)}{star}")

    def close(self) -> None:
        """Close the files and leave the terminal as it was."""
        self._file.close()
        if self._bar is not None:
            self._bar.stop()
        if self._events is not None:
            self._events.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_to_json(record), allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise disk_error(self._path, len(line), error) from error
        if self._events is not None:
            for name, value in _numbers(record):
                self._events.add_scalar(name, value, record["step"])

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory that was in use at once, in MiB.

    Args:
        device: a GPU: what PyTorch has allocated on it; the CPU: the resident set of this process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl; a torn last line is left out.

    Returns:
        One dictionary per line, with non-finite figures as floats; empty without a file.

    Raises:
        CheckpointError: the file can't be read, or another line than the last is damaged.
    """
    path = Path(run_dir) / METRICS
    lines = _read_lines(path)
    records = [_parse(line) for line in lines]
    for number, record in enumerate(records[:-1], start=1):
        if record is None:
            raise CheckpointError(f"{path} line {number} isn't a record; delete that line.")
    return [_from_json(record) for record in records if record is not None]


def _open_metrics(path: Path, resume_step: int) -> TextIO:
    """Open for appending, after dropping what doesn't belong to steps up to the resumed one."""
    lines = _read_lines(path)
    kept = [line for line in lines if _belongs(line, resume_step)]
    if kept != lines:
        write_atomic(path, "".join(kept))
    try:
        return path.open("a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise disk_error(path, 0, error) from error


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            return list(file)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error


def _belongs(line: str, resume_step: int) -> bool:
    record = _parse(line)
    return record is not None and line.endswith("\n") and record["step"] <= resume_step


def _parse(line: str) -> dict[str, Any] | None:
    """Return the record of a line, or None when it isn't one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _to_json(value: Any) -> Any:
    """Replace non-finite floats by the strings that JavaScript and float() understand."""
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a record as `alpha/cross/0/3`, without the step itself."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}/{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
        yield name, float(value)


def _describe(figures: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in figures.items() if isinstance(value, int | float)}
    names = {"tokens_per_second": "tokens/s"}
    return "  ".join(f"{names.get(key, key)} {_short(value)}" for key, value in shown.items())


def _short(value: float) -> str:
    """Format 0.0123456 as 0.01235 and 123456.7 as 123457; NaN stays nan."""
    if math.isfinite(value) and abs(value) >= 10_000:
        return f"{value:.0f}"
    return f"{value:.4g}"


def _progress_bar(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=12),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1)),
        console=console,
    )


def _open_tensorboard(run_dir: Path, resume_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ConfigError(
            "train.tensorboard is true, but TensorBoard isn't installed; "
            'run pip install "sparseformer[tensorboard]".'
        ) from error
    return SummaryWriter(run_dir / "tensorboard", purge_step=resume_step + 1)
