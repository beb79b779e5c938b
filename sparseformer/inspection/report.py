"""A run as one HTML file that opens offline."""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.inspection.figures import curve_html, curves
from sparseformer.inspection.run_folder import RunRecord, read_run
from sparseformer.inspection.tables import results_rows

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def write_report(run_dir: Path | str) -> Path:
    """Write report.html: loss, alpha and density per head, final figures, sample predictions.

    The file holds plotly's script (about 5 MB), so it needs no network. A run that is still
    training gets a report of what there is.

    Args:
        run_dir: RUNS_DIR/NAME of a run.

    Returns:
        The path of the report.

    Raises:
        ConfigError: If plotly is missing, or it is not the folder of a run.
        CheckpointError: If the run folder is broken, or can't be written to.
    """
    _require_plotly()
    html = report_html(read_run(run_dir), Path(run_dir).resolve().name)
    path = Path(run_dir) / "report.html"
    temporary = path.with_suffix(".html.tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"Can't write {path} ({error.strerror}); free some space or check its permissions."
        ) from error
    return path


def report_html(run: RunRecord, name: str) -> str:
    """Return the whole page; every text of the run is escaped."""
    sections = [f"<h1>{escape(name)}</h1>", _settings(run.settings)]
    if run.results is not None:
        sections += ["<h2>Results</h2>", _table(results_rows(run.results))]
        sections += ["<h2>Training</h2>", _table(_facts(run.results["train"]))]
    for position, curve in enumerate(curves(run.metrics)):
        sections += [f"<h2>{escape(curve.title)}</h2>", curve_html(curve, with_script=not position)]
    samples = _samples(run)
    if samples:
        sections += ["<h2>Sample predictions</h2>", _table(samples)]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _settings(settings: Mapping[str, Any]) -> str:
    lines = []
    for key, value in settings.items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        lines += [f"{key}.{name} = {item!r}".replace(". =", " =") for name, item in pairs]
    return f"<details><summary>Settings</summary><pre>{escape(chr(10).join(lines))}</pre></details>"


def _facts(train: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(train), tuple(_figure(value) for value in train.values())]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.10g}"


def _samples(run: RunRecord) -> list[tuple[str, ...]]:
    """Return a header and rows that are spread evenly over the test split."""
    count = _num_samples(run.settings)
    if not run.predictions or not count:
        return []
    stride = max(1, len(run.predictions) // count)
    chosen = run.predictions[::stride][:count]
    header = tuple(chosen[0])
    return [header, *(tuple(str(row.get(name, "")) for name in header) for row in chosen)]


def _num_samples(settings: Mapping[str, Any]) -> int:
    try:
        return int(settings["train"]["num_samples"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "config.toml lacks train.num_samples, so it is not a resolved configuration; "
            "run the same training command again to write it."
        ) from error


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _require_plotly() -> None:
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            'The report needs plotly; install it with: pip install "sparseformer[report]".'
        ) from error
