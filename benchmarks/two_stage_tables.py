"""Print the tables of two_stage.py: mean and standard deviation over the seeds."""

import statistics

COLUMNS = {
    "cross_entropy": "cross-entropy",
    "accuracy": "next token right, %",
    "rouge1": "ROUGE-1",
    "rougeL": "ROUGE-L",
    "seconds": "seconds",
    "alpha": "mean alpha",
    "density": "keys used, %",
}
COMPARED = ("cross_entropy", "accuracy", "rouge1", "rougeL")


def print_table(
    title: str, done: dict[str, dict[int, dict[str, float]]], columns: list[str], base: str | None
) -> None:
    """Print one row per method.

    Args:
        title: head of the first column.
        done: figures by method and seed.
        columns: which figures.
        base: a method to subtract, seed by seed; None prints the figures themselves.
    """
    print(f"| {title} | {' | '.join(COLUMNS[c] for c in columns)} | runs |")
    print("|---" * (len(columns) + 2) + "|")
    for method, by_seed in done.items():
        if method == base:
            continue
        seeds = [seed for seed in by_seed if base is None or seed in done[base]]
        cells = []
        for column in columns:
            values = [by_seed[s][column] - (done[base][s][column] if base else 0.0) for s in seeds]
            cells.append(_cell(values, column, signed=base is not None))
        print(f"| {method} | {' | '.join(cells)} | {len(seeds)} |")
    print()


def _cell(values: list[float], column: str, *, signed: bool) -> str:
    if not values:
        return "-"
    digits = {"cross_entropy": 3, "alpha": 3, "seconds": 0}.get(column, 2)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    sign = "+" if signed else ""
    return f"{statistics.mean(values):{sign}.{digits}f} +- {spread:.{digits}f}"
