"""The end of a run: best weights, test figures, results.json, predictions.jsonl, the report."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparseformer.config import Config
from sparseformer.data import PairDataset, baseline_predictions
from sparseformer.inspection import print_run, read_run
from sparseformer.metrics import compute_metrics
from sparseformer.nn import record_attention
from sparseformer.training.alpha_ramp import set_alpha_of_step
from sparseformer.training.checkpoint import load_model_weights, write_atomic
from sparseformer.training.evaluation import Evaluation, evaluate
from sparseformer.training.module import TrainingModule
from sparseformer.training.setup import Workspace
from sparseformer.training.signals import Signals


def finish(
    config: Config,
    run_dir: Path,
    workspace: Workspace,
    module: TrainingModule,
    signals: Signals,
    progress: Mapping[str, Any],
) -> None:
    """Evaluate the best weights on both splits, and write results.json and predictions.jsonl."""
    set_alpha_of_step(module.model, config, load_model_weights(run_dir, module).step)
    dataset = workspace.dataset

    def run(split: str) -> Evaluation:
        return evaluate(
            module,
            getattr(workspace, split),
            [pair.tgt for pair in getattr(dataset, split)],
            workspace.tokenizer,
            config,
            between_batches=signals.raise_if_stopped,
        )

    validation = run("validation")
    with record_attention(module.model) as record:
        test = run("test")
    seconds = progress["seconds"]
    results = {
        "test": test.metrics,
        "validation": validation.metrics,
        "baseline": _baseline(config, dataset),
        "alpha": module.model.alphas(),
        "density": record.densities(),
        "evaluation": _evaluation_settings(config),
        "train": {
            "steps": progress["step"],
            "best_step": progress["best_step"],
            "skipped_steps": progress["skipped_steps"],
            "seconds": seconds,
            "tokens_per_second": progress["tokens"] / seconds if seconds else 0.0,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
        },
    }
    write_predictions(run_dir / "predictions.jsonl", dataset, test.predictions)
    write_atomic(run_dir / "results.json", json.dumps(_null_for_nan(results), indent=2) + "\n")


def write_predictions(path: Path, dataset: PairDataset, predictions: Sequence[str]) -> None:
    """Write one JSON object per test row: source, target, prediction."""
    lines = [
        json.dumps({"src": pair.src, "tgt": pair.tgt, "prediction": text}, ensure_ascii=False)
        for pair, text in zip(dataset.test, predictions, strict=True)
    ]
    write_atomic(path, "".join(line + "\n" for line in lines))


def has_results(run_dir: Path, step: int, config: Config) -> bool:
    """Return whether the run has been evaluated at this step, with these settings."""
    run = read_run(run_dir)
    if run.results is None or not run.predictions or run.results["train"]["steps"] != step:
        return False
    return bool(run.results.get("evaluation") == _evaluation_settings(config))


def _evaluation_settings(config: Config) -> dict[str, Any]:
    return {"metrics": list(config.metrics), "generation": dataclasses.asdict(config.generation)}


def print_report(run_dir: Path, config: Config, console: Console) -> None:
    """Print the final report: figures, samples, what each head learned."""
    console.print()
    print_run(run_dir, console)
    run = read_run(run_dir)
    if config.train.num_samples and run.predictions:
        console.print(_sample_table(run.predictions, config.train.num_samples))
    results = run.results
    if results is not None:
        train = results["train"]
        console.print(
            f"{train['parameters']:,} parameters, {train['steps']:,} steps in "
            f"{train['seconds']:.0f} s, {train['tokens_per_second']:,.0f} tokens/s; the weights "
            f"are those of step {train['best_step']:,}"
        )
    console.print(f"everything is in {run_dir}", markup=False)


def _baseline(config: Config, dataset: PairDataset) -> dict[str, float]:
    predictions = baseline_predictions(dataset)
    if predictions is None:
        return {}
    return compute_metrics(predictions, [pair.tgt for pair in dataset.test], config.metrics)


def _sample_table(rows: Sequence[Mapping[str, str]], count: int) -> Table:
    table = Table(title="Samples of the test split", title_justify="left")
    for column in ("source", "target", "prediction", ""):
        table.add_column(column, overflow="fold")
    stride = max(1, len(rows) // count)
    for row in rows[::stride][:count]:
        mark = "=" if row["prediction"] == row["tgt"] else "x"
        table.add_row(*(_plain(row[name]) for name in ("src", "tgt", "prediction")), mark)
    return table


def _plain(text: str, limit: int = 120) -> str:
    """Escape rich markup, and cut a long text."""
    return escape(text if len(text) <= limit else text[: limit - 3] + "...")


def _null_for_nan(value: Any) -> Any:
    """Replace figures that JSON can't hold by null."""
    if isinstance(value, dict):
        return {key: _null_for_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_null_for_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
