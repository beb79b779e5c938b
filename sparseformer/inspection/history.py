"""How alpha and density of every attention head moved in training."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparseformer.inspection.run_folder import read_metrics

PerHead = Mapping[str, list[list[float]]]  # "encoder_self", "decoder_self", "cross": [layer][head]


class Head(NamedTuple):
    """One attention head; layer and head count from 1."""

    part: str
    layer: int
    head: int


def alpha_history(metrics_path: Path | str) -> dict[Head, list[tuple[int, float]]]:
    """Read (step, alpha) of every head from a metrics.jsonl, by step.

    Raises:
        CheckpointError: If the file is missing or broken.
    """
    return head_history(read_metrics(Path(metrics_path)), "alpha")


def density_history(metrics_path: Path | str) -> dict[Head, list[tuple[int, float]]]:
    """Read (step, share of visible keys with non-zero probability) of every head, by step.

    Raises:
        CheckpointError: If the file is missing or broken.
    """
    return head_history(read_metrics(Path(metrics_path)), "density")


def head_history(
    records: Iterable[Mapping[str, Any]], name: str
) -> dict[Head, list[tuple[int, float]]]:
    """Collect the figure `name` per head; of a step logged twice, after a resume, the later."""
    by_step = {record["step"]: record[name] for record in records if record.get(name)}
    history: dict[Head, list[tuple[int, float]]] = {}
    for step in sorted(by_step):
        for head, value in per_head(by_step[step]):
            history.setdefault(head, []).append((step, value))
    return history


def per_head(values: PerHead) -> Iterable[tuple[Head, float]]:
    """Iterate over all heads with their value."""
    for part, layers in values.items():
        for layer, heads in enumerate(layers, start=1):
            for head, value in enumerate(heads, start=1):
                yield Head(part, layer, head), value
