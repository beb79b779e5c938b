"""The curves of a run's report, as data and as HTML."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparseformer.inspection.history import Head, head_history

Points = list[tuple[int, float | None]]

_PARTS = {
    "encoder_self": "encoder self-attention",
    "decoder_self": "decoder self-attention",
    "cross": "cross-attention",
}


class Curve(NamedTuple):
    """Lines over training steps that share a scale."""

    title: str
    lines: dict[str, Points]
    y_range: tuple[float, float] | None = None


def curves(records: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return what a report draws: loss, validation metrics, alpha and density of each part."""
    loss = {"training": _points(records, "loss")}
    validations = [
        {"step": record["step"], **record["validation"]}
        for record in records
        if isinstance(record.get("validation"), dict)
    ]
    names = dict.fromkeys(name for record in validations for name in record if name != "step")
    metrics = {name: _points(validations, name) for name in names}
    if "loss" in metrics:
        loss["validation"] = metrics.pop("loss")
    figures = [Curve("Loss per target token", loss)]
    if metrics:
        figures.append(Curve("Validation metrics", metrics))
    figures += _head_curves("Alpha", head_history(records, "alpha"), (0.95, 2.05))
    figures += _head_curves("Density", head_history(records, "density"), (-0.02, 1.02))
    return figures


def curve_html(curve: Curve, *, with_script: bool) -> str:
    """Return a div; the first one of a page brings plotly's script along."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for name, points in curve.lines.items():
        steps, values = zip(*points, strict=True) if points else ((), ())
        figure.add_scatter(x=steps, y=values, name=name, mode="lines+markers", marker_size=4)
    figure.update_layout(
        template="plotly_white", xaxis_title="step", height=380, margin={"t": 20}, showlegend=True
    )
    figure.update_yaxes(range=curve.y_range)
    return str(figure.to_html(full_html=False, include_plotlyjs=with_script))


def _points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Return (step, value) by step; of a step logged twice, after a resume, the later."""
    values = {record["step"]: record[name] for record in records if name in record}
    return [(step, values[step]) for step in sorted(values)]


def _head_curves(
    title: str, history: Mapping[Head, list[tuple[int, float]]], y_range: tuple[float, float]
) -> list[Curve]:
    by_part: dict[str, dict[str, Points]] = {}
    for (part, layer, head), points in history.items():
        by_part.setdefault(part, {})[f"layer {layer} head {head}"] = [*points]
    return [
        Curve(f"{title}: {_PARTS.get(part, part)}", lines, y_range)
        for part, lines in by_part.items()
    ]
