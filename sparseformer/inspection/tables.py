"""Tables of a run's figures for the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparseformer.inspection.history import PerHead
from sparseformer.inspection.run_folder import RunRecord, read_run

SPLITS = ("validation", "test", "baseline")


def print_run(run_dir: Path | str, console: Console) -> None:
    """Print the figures of a run, and what each head's alpha and density became.

    Of a run that is still training, alpha and density are those of the last logged step.

    Args:
        run_dir: RUNS_DIR/NAME of a run.
        console: Where to print.

    Raises:
        ConfigError: If it is not the folder of a run.
        CheckpointError: If the run folder is broken.
    """
    run = read_run(run_dir)
    if run.results is not None:
        console.print(results_table(run.results))
    else:
        console.print(f"{run_dir} has no results yet: the run has not ended.")
    alpha, density = _latest(run, "alpha"), _latest(run, "density")
    if alpha:
        console.print(alpha_table(alpha))
    if density:
        console.print(density_table(density))


def alpha_table(alpha: PerHead) -> Table:
    """Show the alpha of every head: 1 is softmax, 2 is sparsemax.

    Args:
        alpha: [layer][head] of encoder_self, decoder_self and cross, each in [1, 2].
    """
    return _head_table("Alpha of every head (1 softmax, 2 sparsemax)", alpha, "{:.3f}")


def density_table(density: PerHead) -> Table:
    """Show the share of visible keys that every head gives a non-zero probability.

    Args:
        density: [layer][head] of encoder_self, decoder_self and cross, each in [0, 1].
    """
    return _head_table("Keys with non-zero probability", density, "{:.1%}")


def results_table(results: Mapping[str, Any]) -> Table:
    """Show the metrics of the validation split, the test split and the baseline side by side.

    Args:
        results: As in results.json; a split that is left out has no column.
    """
    header, *rows = results_rows(results)
    table = Table(title="Results", title_justify="left")
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def results_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header and one row per metric; a split without figures is left out."""
    splits = [split for split in SPLITS if results.get(split)]
    names = dict.fromkeys(name for split in splits for name in results[split])
    rows = [
        (name, *(format_metric(name, results[split].get(name)) for split in splits))
        for name in names
    ]
    return [("metric", *splits), *rows]


def format_metric(name: str, value: float | None) -> str:
    """Write a loss with 4 decimals, a percentage with 2, and a missing figure as a dash."""
    if value is None:
        return "-"
    return f"{value:.4f}" if name == "loss" else f"{value:.2f}"


def _latest(run: RunRecord, name: str) -> PerHead:
    """Return a figure per head from the results, else from the last step that logged it."""
    sources = [run.results or {}, *reversed(run.metrics)]
    return next((source[name] for source in sources if source.get(name)), {})


def _head_table(title: str, values: PerHead, pattern: str) -> Table:
    num_heads = max((len(heads) for layers in values.values() for heads in layers), default=0)
    table = Table(title=title, title_justify="left")
    table.add_column("attention")
    for head in range(1, num_heads + 1):
        table.add_column(f"head {head}", justify="right")
    for part, layers in values.items():
        for layer, heads in enumerate(layers, start=1):
            cells = ("-" if value is None else pattern.format(value) for value in heads)
            table.add_row(f"{part} {layer}", *cells)
    return table
