"""Read the files that a run leaves in its folder."""

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sparseformer.errors import CheckpointError, ConfigError

_RESULT_PARTS = ("test", "validation", "baseline", "alpha", "train")


class RunRecord(NamedTuple):
    """What a run folder says, as plain data."""

    settings: dict[str, Any]
    """config.toml, resolved."""
    metrics: list[dict[str, Any]]
    """metrics.jsonl, one dict per line."""
    results: dict[str, Any] | None
    """results.json; None until the run has ended."""
    predictions: list[dict[str, Any]]
    """predictions.jsonl, one dict per test row; empty until the run has ended."""


def read_run(run_dir: Path | str) -> RunRecord:
    """Read a run folder; the run may still be training.

    Args:
        run_dir: RUNS_DIR/NAME of a run.

    Returns:
        Its settings and figures.

    Raises:
        ConfigError: If there is no such folder.
        CheckpointError: If a file that every run has is missing, or one can't be read.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; pass the folder of a run, such as runs/NAME.")
    results, predictions = folder / "results.json", folder / "predictions.jsonl"
    return RunRecord(
        settings=_read_toml(folder / "config.toml"),
        metrics=read_metrics(folder / "metrics.jsonl"),
        results=_read_results(results) if results.exists() else None,
        predictions=read_json_lines(predictions) if predictions.exists() else [],
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, every line of which belongs to an optimiser step.

    JSON has no NaN and no infinity, so they stand there as strings, and are floats here.

    Raises:
        CheckpointError: If the file is missing or broken.
    """
    records = read_json_lines(path)
    for record in records:
        if not isinstance(record.get("step"), int):
            raise CheckpointError(f"{path} has a line without a step; restore or delete it.")
    return [_with_floats(record) for record in records]


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line; a last line cut short by a crash is left out.

    Raises:
        CheckpointError: If the file is missing, or another line is no JSON object.
    """
    *lines, unfinished = _read_text(path).split("\n")  # a whole file ends with a line break
    numbered = enumerate(lines, start=1)
    records = [_parse_object(path, line, f" line {n}") for n, line in numbered if line.strip()]
    with suppress(CheckpointError):
        records.append(_parse_object(path, unfinished))
    return records


def _parse_object(path: Path, text: str, place: str = "") -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}{place} is not JSON ({error}); restore or delete it."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}{place} is not a JSON object; restore or delete it.")
    return value


def _read_results(path: Path) -> dict[str, Any]:
    results = _parse_object(path, _read_text(path))
    for part in _RESULT_PARTS:
        if not isinstance(results.get(part), dict):
            raise CheckpointError(
                f"{path} lacks the table {part!r}; delete it and run the same command again."
            )
    return results


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(f"{path} is not TOML ({error}); restore it.") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing, so {path.parent} is not the folder of a run; pass runs/NAME."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"Can't read {path} ({error}); check it or restore it.") from error
