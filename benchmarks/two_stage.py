"""Do sparse attention and a sparse loss pay off in fine-tuning, and cost from scratch?

    python benchmarks/two_stage.py --out two_stage --jobs 2

Per seed, a small model is pretrained with softmax and cross-entropy on Debian's package
descriptions. Then {softmax, entmax_adaptive} x {cross_entropy, sparse_topk} train on a few thousand
docstrings, once from that checkpoint and once from random weights, with equal steps, data and
tokenizer. Without apt: --pretrain-source docstrings, which then lends the model the same domain.

Every run is `train.py` as a user would call it, one thread each; what has finished is not run
again, so the same command goes on after a stop. --tables prints what has finished so far. With
`--pilot LR ...` softmax with cross_entropy is trained at each learning rate on the first seed
alone, and the validation cross-entropy says which to take.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from two_stage_tables import COLUMNS, COMPARED, print_table

from sparseformer.config import DataConfig, SourceName
from sparseformer.data import Pair, collate, load_dataset
from sparseformer.training.evaluation import evaluation_batches
from sparseformer.training.framing import encode_split
from sparseformer.training.load_run import LoadedRun, load_run

TRAIN = Path(__file__).parents[1] / "train.py"
FIGURES = "figures.json"
LENGTHS = ["--data.max-source-length", "64", "--data.max-target-length", "24"]
COMMON = [
    *("--metrics", "rouge1", "rougeL", "--train.num-samples", "0", "--train.log-every", "100"),
    *LENGTHS,
    *("--data.batch-tokens", "2048", "--model.dropout", "0.1", "--model.positions", "rotary"),
]
SHAPE = ["--model.d-model", "128", "--model.ffn-dim", "512"]
STAGES = ("finetuned", "scratch")


class Method(NamedTuple):
    """What is compared: --attn, --loss, and what of their defaults is set."""

    attn: str
    loss: str
    alpha: float | None = None
    """Where learned alphas start; None as by default: 1.05 in fine-tuning, 1.5 from scratch."""
    has_warmup: bool = False
    """The full cross-entropy for a quarter of the steps, as by default from scratch."""
    k: int | None = None
    """Classes that sparse_topk keeps; None for those of --k."""


METHODS = {
    "softmax, cross_entropy": Method("softmax", "cross_entropy"),
    "softmax, sparse_topk": Method("softmax", "sparse_topk"),
    "entmax_adaptive, cross_entropy": Method("entmax_adaptive", "cross_entropy"),
    "entmax_adaptive, sparse_topk": Method("entmax_adaptive", "sparse_topk"),
}
BASE = "softmax, cross_entropy"
FROM_15 = Method("entmax_adaptive", "sparse_topk", alpha=1.5)
WARM = Method("entmax_adaptive", "sparse_topk", has_warmup=True)
# How much of the damage of a truncated loss is that k is too small.
LARGER_K = {
    f"softmax, sparse_topk of {k}": Method("softmax", "sparse_topk", k=k) for k in (64, 512)
}
METHODS_OF = {
    "finetuned": METHODS | LARGER_K | {"entmax_adaptive from 1.5, sparse_topk": FROM_15},
    "scratch": METHODS | {"entmax_adaptive, sparse_topk, warm-up": WARM},
}
DEFAULT_ALPHA = {"finetuned": 1.05, "scratch": 1.5}


class Run(NamedTuple):
    """One call of train.py: the name of its run folder, and its own flags."""

    name: str
    flags: list[str]


def main() -> None:
    """Run what is missing, and print the tables."""
    options = _options()
    if not options.tables:
        torch.set_num_threads(1)
        _write_pairs(options)
        seeds = options.seeds[:1] if options.pilot else options.seeds
        _run_all([_pretraining(options, seed) for seed in seeds], options)
        runs = _pilot(options) if options.pilot else _comparison(options)
        _run_all(runs, options)
    if options.pilot:
        _print_pilot(options)
    else:
        _print_tables(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("two_stage"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pretrain-source", default="debian")
    parser.add_argument("--pretrain-steps", type=int, default=1800)
    parser.add_argument("--pretrain-lr", type=float, default=2e-3)
    parser.add_argument("--source", default="docstrings", help="what the compared runs train on")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=4000, help="training pairs of these runs")
    parser.add_argument("--eval-rows", type=int, default=500)
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--finetuned-lr", type=float, default=4e-3)
    parser.add_argument("--scratch-lr", type=float, default=4e-3)
    parser.add_argument("--k", type=int, default=10, help="classes that sparse_topk keeps")
    parser.add_argument("--pilot", type=float, nargs="+", metavar="LR")
    parser.add_argument(
        "--tables", action="store_true", help="print what has finished, run nothing"
    )
    return parser.parse_args()


def _write_pairs(options: argparse.Namespace) -> None:
    """Draw the pairs once, so that all runs see the same whatever is installed meanwhile."""
    options.out.mkdir(parents=True, exist_ok=True)
    if _pairs_file(options, "test").exists():
        return
    source: SourceName = options.source
    dataset = load_dataset(DataConfig(source=source), seed=0)
    limits = {"train": options.rows, "validation": options.eval_rows, "test": options.eval_rows}
    for split, limit in limits.items():
        pairs: Sequence[Pair] = getattr(dataset, split)
        drawn = random.Random(split).sample(list(pairs), min(limit, len(pairs)))
        lines = [json.dumps(pair._asdict()) + "\n" for pair in drawn]
        _pairs_file(options, split).write_text("".join(lines))


def _pairs_file(options: argparse.Namespace, split: str) -> Path:
    path: Path = options.out / f"{split}.jsonl"
    return path


def _pretraining(options: argparse.Namespace, seed: int) -> Run:
    flags = [
        *("--data.source", options.pretrain_source, "--data.tokenizer", "bpe"),
        *("--data.vocab-size", str(options.vocab_size)),
        *("--data.max-eval-rows", str(options.eval_rows), *SHAPE),
        *_schedule(options.pretrain_steps, options.pretrain_lr),
    ]
    return Run(f"pretrained-seed{seed}", [*flags, "--seed", str(seed)])


def _comparison(options: argparse.Namespace) -> list[Run]:
    rates = {"finetuned": options.finetuned_lr, "scratch": options.scratch_lr}
    return [
        _training(options, stage, method, seed, rates[stage])
        for seed in options.seeds
        for stage in STAGES
        for method in METHODS_OF[stage]
    ]


def _pilot(options: argparse.Namespace) -> list[Run]:
    seed = options.seeds[0]
    return [
        _training(options, stage, BASE, seed, rate, f"-lr{rate:g}")
        for rate in options.pilot
        for stage in STAGES
    ]


def _training(
    options: argparse.Namespace, stage: str, method: str, seed: int, rate: float, suffix: str = ""
) -> Run:
    chosen = METHODS_OF[stage][method]
    warmup = options.steps // 4 if chosen.has_warmup else 0
    alpha = chosen.alpha or DEFAULT_ALPHA[stage]
    pretrained = options.out / "runs" / _pretraining(options, seed).name
    tokenizer = ["--data.tokenizer-file", str(pretrained / "tokenizer.json")]
    start = ["--init-from", str(pretrained)] if stage == "finetuned" else [*SHAPE, *tokenizer]
    flags = [
        *("--attn", chosen.attn, "--loss", chosen.loss, "--seed", str(seed), *start),
        *("--objective.k", str(chosen.k or options.k), "--objective.warmup-steps", str(warmup)),
        *("--model.alpha", str(alpha), "--data.source", "files"),
        *_schedule(options.steps, rate),
    ]
    for split in ("train", "validation", "test"):
        flags += [f"--data.{split}-file", str(_pairs_file(options, split))]
    return Run(_name(stage, method, seed) + suffix, flags)


def _name(stage: str, method: str, seed: int) -> str:
    return f"{stage}-{method.replace(', ', '-').replace(' ', '-')}-seed{seed}"


def _schedule(steps: int, rate: float) -> list[str]:
    """Validate only at the end, so that no run is chosen by a figure another one lacks."""
    return [
        *("--train.steps", str(steps), "--train.eval-every", str(steps)),
        *("--train.save-every", str(steps), "--optim.warmup-steps", str(min(100, steps // 4))),
        *("--optim.lr", str(rate)),
    ]


def _run_all(runs: list[Run], options: argparse.Namespace) -> None:
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: _run_one(run, options.out), runs))


def _run_one(run: Run, out: Path) -> None:
    """Train one run unless it has finished, and measure it."""
    folder = out / "runs" / run.name
    if not (folder / "results.json").exists():
        command = [sys.executable, str(TRAIN), *COMMON, *run.flags]
        command += ["--runs-dir", str(out / "runs"), "--name", run.name]
        started = time.perf_counter()
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        (out / f"{run.name}.log").write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        if done.returncode:
            raise SystemExit(f"{run.name} ended with {done.returncode}: {done.stderr}")
        print(f"{run.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if not (folder / FIGURES).exists():
        (folder / FIGURES).write_text(json.dumps(_figures(folder)))


def _figures(folder: Path) -> dict[str, float]:
    """Return figures of the test split that mean the same for every loss, and what it cost."""
    results = json.loads((folder / "results.json").read_text())
    run = load_run(folder)
    dataset = load_dataset(run.config.data, run.config.seed)
    scores = {
        split: _token_scores(run, getattr(dataset, split)) for split in ("validation", "test")
    }
    return {
        **scores["test"],
        "validation_cross_entropy": scores["validation"]["cross_entropy"],
        "rouge1": results["test"]["rouge1"],
        "rougeL": results["test"]["rougeL"],
        "seconds": results["train"]["seconds"],
        "alpha": _mean(results["alpha"]),
        "density": 100 * _mean(results["density"]),
    }


def _mean(nested: dict[str, list[list[float]]]) -> float:
    return statistics.mean(x for layers in nested.values() for heads in layers for x in heads)


@torch.no_grad()
def _token_scores(run: LoadedRun, pairs: Sequence[Pair]) -> dict[str, float]:
    """Return full-softmax cross-entropy and accuracy per target token, teacher-forced."""
    encoded = encode_split(pairs, run.tokenizer, run.config.data, run.module.framing)
    loss, right, count = 0.0, 0, 0
    model = run.module.model
    for rows in evaluation_batches(encoded, run.config):
        batch = collate(encoded, rows, run.tokenizer)
        logits = model.logits(model(batch.src, batch.src_length, batch.decoder_input))
        targets = batch.labels.flatten()
        loss += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets, reduction="sum"
        ).item()
        right += int((logits.argmax(-1).flatten() == targets).sum())
        count += batch.num_targets
    return {"cross_entropy": loss / count, "accuracy": 100 * right / count}


def _print_pilot(options: argparse.Namespace) -> None:
    print("| run | validation cross-entropy |\n|---|---|")
    for run in _pilot(options):
        figures = _read(options, run.name)
        if figures:
            print(f"| {run.name} | {figures['validation_cross_entropy']:.3f} |")


def _print_tables(options: argparse.Namespace) -> None:
    print(f"torch {torch.__version__}, seeds {options.seeds}, test split, mean +- deviation\n")
    for stage in STAGES:
        rows = {
            method: {seed: _read(options, _name(stage, method, seed)) for seed in options.seeds}
            for method in METHODS_OF[stage]
        }
        done = {m: {s: f for s, f in by_seed.items() if f} for m, by_seed in rows.items()}
        print_table(stage, done, list(COLUMNS), None)
        print_table(f"{stage}, minus {BASE} of the same seed", done, list(COMPARED), BASE)


def _read(options: argparse.Namespace, name: str) -> dict[str, float]:
    path = options.out / "runs" / name / FIGURES
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
