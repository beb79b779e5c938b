"""Print how far the probabilities of a query are from a sum of 1, ours and AdaSplash-2's.

    python benchmarks/attention_normalisation.py

fp32, without a mask. Ours are the Triton kernels in Triton's interpreter; AdaSplash-2's are the
steps of its three passes (adasplash 0.2.2, alpha 1.5) in PyTorch, on the same scores.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

ALPHAS = (1.0, 1.05, 1.5, 2.0)
LENGTHS = (1, 16, 256, 4096, 65536)
ROWS = 16
KINDS = ("equal", "std 0.05", "std 1", "one-hot")


class Problem(NamedTuple):
    """Tensors whose scores, scale 1, are those asked for: one head for each kind."""

    query: Tensor
    key: Tensor
    value: Tensor


def main() -> None:
    """Print the table of docs/attention_work.md."""
    # Triton reads this when it is imported, which nothing here has done yet.
    os.environ["TRITON_INTERPRET"] = "1"
    names = [*(f"ours, alpha {alpha:g}" for alpha in ALPHAS), "AdaSplash-2, alpha 1.5"]
    print(f"| scores | L | {' | '.join(names)} |\n{'|---' * (len(names) + 2)}|")
    for length in LENGTHS:
        errors = [kernel_errors(length, alpha) for alpha in ALPHAS]
        theirs = [_error(adasplash_sums(scores(kind, length))) for kind in KINDS]
        for index, kind in enumerate(KINDS):
            ours = " | ".join(f"{error[index]:.0e}" for error in errors)
            print(f"| {kind} | {length} | {ours} | {theirs[index]:.0e} |", flush=True)


def scores(kind: str, length: int) -> Tensor:
    """Return [ROWS, length] scores in fp32.

    one-hot: one key of 40, the others normal around 0: even softmax rounds them to nothing.
    """
    draw = torch.Generator().manual_seed(length)
    normal = torch.randn(ROWS, length, generator=draw)
    if kind == "equal":
        return torch.full((ROWS, length), 0.75)
    if kind == "one-hot":
        return torch.where(torch.arange(length) == length // 2, 40.0, normal)
    return normal * float(kind.removeprefix("std "))


def problem(length: int, kinds: tuple[str, ...] = KINDS) -> Problem:
    """Return a call whose head h has the scores of kinds[h], and whose values are 1."""
    key = torch.stack([scores(kind, length).T for kind in kinds])[None]
    query = torch.eye(ROWS).expand(1, len(kinds), ROWS, ROWS)
    return Problem(query, key, torch.ones_like(key))


def kernel_errors(
    length: int, alpha: float, keep: bool = False, kinds: tuple[str, ...] = KINDS
) -> list[float]:
    """Return the largest distance from 1 of each kind through the interpreted kernels.

    Args:
        length: keys.
        alpha: in [1, 2].
        keep: run the forward pass of training, else that of inference.
        kinds: of scores, one head each.
    """
    from sparseformer.kernels.entmax_attention.blocks import Blocks
    from sparseformer.kernels.entmax_attention.checks import Options, entmax_arguments
    from sparseformer.kernels.entmax_attention.forward import attention_forward

    arguments = entmax_arguments(*problem(length, kinds), alpha, Options(scale=1.0))
    # Above 4096 keys wider tiles, or the interpreter takes minutes.
    keys = max(64, length // 128)
    output, _ = attention_forward(arguments, keep, Blocks(ROWS, min(keys, 512)))
    return [_error(output[0, head, :, 0]) for head in range(len(kinds))]


def adasplash_sums(scaled: Tensor) -> Tensor:
    """Return sum p of each row by AdaSplash-2's steps: maximum, histogram, two Halley steps."""
    x = 0.5 * scaled
    bins = 8 if -(-x.shape[1] // 64) <= 255 else 4
    base = x.amax(1) - 1.0
    tau = base + _tau_of_histogram(x - base[:, None], bins)
    low, high = tau, tau + 1.0 / bins
    tau = 0.5 * (low + high)
    # One refinement by default, and the pass that writes the mask takes another step.
    for _ in range(2):
        above = (x - tau[:, None]).clamp_min(0.0)
        excess, slope = above.square().sum(1) - 1.0, -2.0 * above.sum(1)
        bend = 2.0 * (above > 0).sum(1)
        low, high = torch.where(excess > 0, tau, low), torch.where(excess < 0, tau, high)
        halley = tau - excess * slope / (slope * slope - 0.5 * excess * bend)
        inside = (halley > low - 1e-5) & (halley < high + 1e-5)
        tau = torch.where(inside, halley, 0.5 * (low + high))
    return (x - tau[:, None]).clamp_min(0.0).square().sum(1)


def _tau_of_histogram(above: Tensor, bins: int) -> Tensor:
    """Return the root where every score counts as the lower border of its bin."""
    place = (above * bins).floor().clamp_max(bins - 1)
    squares = sums = count = torch.ones(len(above))
    for bin_index in range(bins - 1, -1, -1):
        border = bin_index / bins
        found = (place == bin_index).sum(1) - (1.0 if bin_index == bins - 1 else 0.0)
        more = squares + found * border**2, sums + found * border, count + found
        fits = more[2] * border**2 - 2 * more[1] * border + more[0] < 1.0
        squares, sums, count = (
            torch.where(fits, new, old)
            for new, old in zip(more, (squares, sums, count), strict=True)
        )
    return (sums - (sums * sums - count * (squares - 1.0)).sqrt()) / count


def _error(sums: Tensor) -> float:
    return (sums.double() - 1.0).abs().max().item()


if __name__ == "__main__":
    main()
