"""Time the losses from hidden states beside torch's, and measure their peak memory.

    python benchmarks/losses.py [--plot docs/losses.svg]

Forward + backward of 1,024 tokens of 512 features in fp32, logits of standard deviation 1 ("flat",
as at the start of training) or 4 ("peaked", as of a trained model). Each figure is the median of
repeats that take turns; peer / ours is above 1 where ours is quicker. Peak memory is that of
tensors beyond the inputs and gradients; the libraries have some MiB of buffers on top.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from timing import Case, header, options, run, tensor_peak
from torch import Tensor
from torch.nn import functional as F

from sparseformer.functional import linear_entmax_loss, linear_sparse_cross_entropy

FLAT, PEAKED = 1.0, 4.0
TORCH = "F.linear + F.cross_entropy"
CHUNKED = "F.linear_cross_entropy"
LOSSES = {
    "top-k 32": lambda h, w, y: linear_sparse_cross_entropy(h, w, y, k=32),
    "top-k 64": lambda h, w, y: linear_sparse_cross_entropy(h, w, y, k=64),
    "entmax 1.5": lambda h, w, y: linear_entmax_loss(h, w, y, 1.5),
    "entmax 2": lambda h, w, y: linear_entmax_loss(h, w, y, 2.0),
    TORCH: lambda h, w, y: F.cross_entropy(F.linear(h, w), y),
    CHUNKED: lambda h, w, y: F.linear_cross_entropy(h, w, y),
}
PEERS = (TORCH, CHUNKED)
Point = tuple[int, float]


class Shape(NamedTuple):
    """The size of one call, and the standard deviation of its logits."""

    tokens: int
    width: int
    vocab: int
    spread: float = FLAT

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, output matrix and targets, the same for every loss."""
        torch.manual_seed(0)
        h = torch.randn(self.tokens, self.width, requires_grad=True)
        w = torch.randn(self.vocab, self.width) * (self.spread * self.width**-0.5)
        return h, w.requires_grad_(), torch.randint(self.vocab, (self.tokens,))

    def __str__(self) -> str:
        """Show the shape in a few words."""
        kind = "flat" if self.spread == FLAT else "peaked"
        return f"{self.tokens} x {self.width}, V = {self.vocab:,}, {kind}"


MAIN = [Shape(1024, 512, vocab, s) for vocab in (50_304, 131_072) for s in (FLAT, PEAKED)]
SWEEP = [
    *(Shape(1024, 512, vocab) for vocab in (4_096, 8_192, 16_384, 32_768)),
    *(Shape(tokens, 512, 50_304) for tokens in (128, 512, 2048)),
]


def main() -> None:
    """Print the tables."""
    plot = _plot_path()
    chosen = options(__doc__)
    print(header(chosen.threads, ()), end="\n\n")
    records = run(_cases(MAIN, PEERS), chosen)
    print()
    records += run(_cases(SWEEP, (TORCH,), ("top-k 64", "entmax 1.5")), chosen)
    if not chosen.only:
        _print_memory()
    if plot:
        _draw(records, plot)


def _plot_path() -> Path | None:
    if "--plot" not in sys.argv:
        return None
    place = sys.argv.index("--plot")
    path = Path(sys.argv[place + 1])
    del sys.argv[place : place + 2]
    return path


def _cases(
    shapes: list[Shape], peers: tuple[str, ...], names: tuple[str, ...] | None = None
) -> Iterator[Case]:
    for shape in shapes:
        operands = shape.operands()

        def bound(name: str, operands=operands):
            return lambda: LOSSES[name](*operands)

        for name in names or [name for name in LOSSES if name not in PEERS]:
            title = f"{name}, {shape}"
            yield Case(title, bound(name), {p: bound(p) for p in peers}, operands[:2])


def _print_memory() -> None:
    print(
        "\n| loss | shape | logits MiB | peak MiB beyond gradients | share |\n|---|---|---|---|---|"
    )
    for shape in MAIN:
        operands = shape.operands()
        gradients = 4 * (operands[0].numel() + operands[1].numel())
        logits = 4 * shape.tokens * shape.vocab / 2**20
        for name, loss in LOSSES.items():
            operands[0].grad = operands[1].grad = None
            peak = tensor_peak(lambda loss=loss, o=operands: loss(*o).backward(), gradients)
            print(f"| {name} | {shape} | {logits:.0f} | {peak:.1f} | {peak / logits:.3f} |")


def _draw(records: list[dict[str, object]], path: Path) -> None:
    """Draw the ratio to F.linear + F.cross_entropy over the vocabulary and over the tokens."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    titles = ("classes, 1,024 tokens", "tokens, 50,304 classes")
    for name, colour in (("top-k 64", "#2a78d6"), ("entmax 1.5", "#d95f02")):
        for panel, title, points in zip(panels, titles, _points(records, name), strict=True):
            panel.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=name)
            panel.set(xscale="log", xlabel=title, ylim=(0, None))
    for panel in panels:
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"times as fast as\n{TORCH}")
    panels[0].legend(frameon=False)
    figure.savefig(path)


def _points(records: list[dict[str, object]], name: str) -> tuple[list[Point], list[Point]]:
    """Return (classes, ratio) at 1,024 tokens and (tokens, ratio) at 50,304 classes."""
    ratios = {record["name"]: record["ratio"] for record in records if record["peer"] == TORCH}
    found = [(s, ratios[f"{name}, {s}"]) for s in (*MAIN, *SWEEP) if s.spread == FLAT]
    by_vocab = [(s.vocab, ratio) for s, ratio in found if s.tokens == 1024]
    return by_vocab, [(s.tokens, ratio) for s, ratio in found if s.vocab == 50_304]


if __name__ == "__main__":
    main()
