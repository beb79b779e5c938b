"""One of the processes of test_vocab_parallel: evaluates the cases, and saves what it found."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparseformer.functional import (
    parallel_linear_entmax_loss,
    parallel_linear_sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss import linear

ROWS, WIDTH, CLASSES = 7, 5, 44
# Sizes of the slices of two processes, by the name of the cut.
CUTS = {"uneven": (9, 35), "narrow-second": (41, 3), "even": (22, 22)}
TARGET = torch.tensor([0, CLASSES - 1, 8, 9, -100, 40, 41])

# name: (cut, options, what is changed in the operands)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "top-k": ("uneven", {"k": 4}, ""),
    "top-k-wider-than-a-slice": ("narrow-second", {"k": 20, "label_smoothing": 0.2}, ""),
    "top-k-ties": ("uneven", {"k": 6}, "ties"),
    "top-k-softcap": ("even", {"k": 3, "softcap": 2.0, "reduction": "sum"}, ""),
    "top-k-unreduced": ("even", {"k": 3, "reduction": "none"}, ""),
    "top-k-tiles": ("uneven", {"k": 4, "chunk_size": 2}, "tiles"),
    "top-k-ignored": ("even", {"k": 4}, "ignored"),
    "top-k-nan": ("uneven", {"k": 4, "reduction": "none"}, "nan"),
    "entmax": ("uneven", {"alpha": 1.5}, ""),
    "sparsemax": ("narrow-second", {"alpha": 2.0, "softcap": 4.0}, ""),
    "sparsemax-ties": ("uneven", {"alpha": 2.0}, "ties"),
    "softmax": ("even", {"alpha": 1.0, "reduction": "none"}, ""),
    "near-softmax": ("even", {"alpha": 1.0 + 1e-9}, ""),
    "one-alpha": ("uneven", {"alpha": torch.tensor(1.3)}, "alpha"),
    "alpha-of-rows": (
        "even",
        {"alpha": torch.linspace(1.0, 2.0, ROWS, dtype=torch.float64), "reduction": "none"},
        "alpha",
    ),
    "entmax-chunks": ("uneven", {"alpha": 1.2, "chunk_size": 2}, ""),
    "entmax-excluded": ("uneven", {"alpha": 1.4, "reduction": "none"}, "excluded"),
    "entmax-ignored": ("even", {"alpha": 1.5}, "ignored"),
    "entmax-nan": ("uneven", {"alpha": 1.5, "reduction": "none"}, "nan"),
}


def operands(change: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the whole matrix and bias, and targets, the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias, target = (
        2 * draw(ROWS, WIDTH),
        draw(CLASSES, WIDTH),
        draw(CLASSES),
        TARGET,
    )
    if change == "ties":
        # Pairs of equal logits, one in each slice; and a row of equal ones alone.
        weight[9:18], bias[9:18] = weight[:9], bias[:9]
        hidden[2], bias[:] = 0.0, 0.5
    if change == "excluded":
        bias[::3] = -torch.inf
        target = torch.tensor([1, 43, 8, 10, -100, 40, 41])
    if change == "nan":
        weight[30] = torch.nan
    if change == "ignored":
        target = torch.full_like(target, -100)
    return hidden, weight, bias, target


def evaluate(loss: Any, leaves: tuple[Tensor, ...], target: Tensor, options: Any) -> list[Tensor]:
    """Return the loss and its gradients in hidden states, matrix, bias and a tensor alpha."""
    hidden, weight, bias = (leaf.clone().requires_grad_() for leaf in leaves)
    options, inputs = dict(options), [hidden, weight, bias]
    if isinstance(options.get("alpha"), Tensor):
        options["alpha"] = options["alpha"].double().requires_grad_()
        inputs.append(options["alpha"])
    losses = loss(hidden, weight, target, linear_bias=bias, **options)
    scale = torch.arange(1.0, 1.0 + losses.numel(), dtype=torch.float64).view(losses.shape)
    return [losses.detach(), *torch.autograd.grad((losses * scale).sum(), inputs)]


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    whole = linear.WHOLE_LOGITS, linear.TILE_LOGITS
    found = {}
    for name, (cut, options, change) in CASES.items():
        first = sum(CUTS[cut][:rank])
        own = slice(first, first + CUTS[cut][rank])
        hidden, weight, bias, target = operands(change)
        loss = (
            parallel_linear_sparse_cross_entropy if "k" in options else parallel_linear_entmax_loss
        )
        linear.WHOLE_LOGITS, linear.TILE_LOGITS = (0, 8) if change == "tiles" else whole
        found[name] = evaluate(loss, (hidden, weight[own], bias[own]), target, options)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
