"""Read the files that a run leaves in its folder."""

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sparseformer.errors import CheckpointError, ConfigError

_METRIC_PARTS = ("test", "validation", "baseline")
_HEAD_PARTS = ("alpha", "density")
_TRAIN_FIGURES = ("steps", "seconds", "tokens_per_second", "parameters")
_PREDICTION_TEXTS = ("src", "tgt", "prediction")


class RunRecord(NamedTuple):
    """What a run folder says, as plain data."""

    settings: dict[str, Any]
    """config.toml, resolved."""
    metrics: list[dict[str, Any]]
    """metrics.jsonl, one dict per line; empty until a step has been logged."""
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
        ConfigError: If there is no such folder, or it has no config.toml.
        CheckpointError: If a file can't be read, or holds something else than a run writes.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; pass the folder of a run, such as runs/NAME.")
    config = folder / "config.toml"
    if not config.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {config.name}; pass runs/NAME.")
    metrics, predictions = folder / "metrics.jsonl", folder / "predictions.jsonl"
    results = folder / "results.json"
    return RunRecord(
        settings=_read_toml(config),
        metrics=read_metrics(metrics) if metrics.exists() else [],
        results=_read_results(results) if results.exists() else None,
        predictions=_read_predictions(predictions) if predictions.exists() else [],
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, every line of which belongs to an optimiser step.

    JSON has no NaN and no infinity, so they stand there as strings, and are floats here.

    Raises:
        CheckpointError: If the file is missing or broken.
    """
    records = [_with_floats(record) for record in read_json_lines(path)]
    for record in records:
        if not isinstance(record.get("step"), int):
            raise CheckpointError(f"{path} has a line without a step; restore or delete it.")
        for part in _HEAD_PARTS:
            if record.get(part) is not None and not _is_per_head(record[part]):
                raise CheckpointError(
                    f"{path} has no list per layer and head in {part!r} of step {record['step']}; "
                    "restore or delete it."
                )
    return records


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
    problem = _results_problem(results)
    if problem:
        raise CheckpointError(f"{path} {problem}; delete it and run the same command again.")
    return results


def _results_problem(results: Mapping[str, Any]) -> str:
    """Say what is wrong with results.json, or nothing."""
    for part in (*_METRIC_PARTS, "alpha", "train"):
        if not isinstance(results.get(part), dict):
            return f"lacks the table {part!r}"
    for part in (*_METRIC_PARTS, "train"):
        for name, value in results[part].items():
            if value is not None and not _is_number(value):
                return f"has no number in {part}.{name}"
    for name in _TRAIN_FIGURES:
        if not _is_number(results["train"].get(name)):
            return f"has no number in train.{name}"
    for part in _HEAD_PARTS:
        if results.get(part) is not None and not _is_per_head(results[part]):
            return f"has no list per layer and head in {part!r}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_per_head(values: Any) -> bool:
    """Return whether values are [layer][head] by part; null is a head that saw no key."""
    return isinstance(values, dict) and all(
        isinstance(layers, list)
        and all(isinstance(heads, list) for heads in layers)
        and all(value is None or _is_number(value) for heads in layers for value in heads)
        for layers in values.values()
    )


def _read_predictions(path: Path) -> list[dict[str, Any]]:
    rows = read_json_lines(path)
    for number, row in enumerate(rows, 1):
        for name in _PREDICTION_TEXTS:
            if not isinstance(row.get(name), str):
                raise CheckpointError(
                    f"{path} has no text {name!r} in row {number}; delete it and results.json, and "
                    "run the same command again."
                )
    return rows


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
