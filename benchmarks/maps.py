"""Time the row-wise maps beside the `entmax` package, and compare their errors with float64.

    python benchmarks/maps.py

Forward + backward, fp32, standard normal scores. Each figure is the median of repeats that take
turns; peer / ours is above 1 where ours is quicker.
"""

from collections.abc import Callable, Iterator

import entmax as peer
import torch
from timing import Case, header, options, run
from torch import Tensor

from sparseformer.functional import entmax, entmax15, sparsemax
from sparseformer.kernels.entmax.reference import entmax_rows

SHAPES = ((2048, 256), (256, 2048), (16, 32_000))
Map = Callable[[Tensor], Tensor]
# Name, ours, theirs, alpha.
MAPS: tuple[tuple[str, Map, str, Map, float], ...] = (
    ("entmax15", entmax15, "entmax15", peer.entmax15, 1.5),
    ("sparsemax", sparsemax, "sparsemax", peer.sparsemax, 2.0),
    (
        "entmax 1.3",
        lambda x: entmax(x, 1.3),
        "entmax_bisect",
        lambda x: peer.entmax_bisect(x, 1.3),
        1.3,
    ),
)


def main() -> None:
    """Print a table of times, one of errors, and one of the gradient of alpha."""
    chosen = options(__doc__)
    print(header(chosen.threads, ("entmax",)), end="\n\n")
    run(_cases(), chosen)
    _print_errors()
    _print_alpha_gradients()


def _cases() -> Iterator[Case]:
    for rows, length in SHAPES:
        x = torch.randn(rows, length, requires_grad=True)
        weight = torch.randn(rows, length)
        for name, ours, peer_name, theirs, _ in MAPS:
            yield Case(
                f"{name}, {rows} x {length}",
                lambda ours=ours, x=x, w=weight: ours(x) * w,
                {peer_name: lambda theirs=theirs, x=x, w=weight: theirs(x) * w},
                (x,),
            )
        alpha = torch.tensor(1.3, requires_grad=True)
        yield Case(
            f"entmax, alpha learned, {rows} x {length}",
            lambda x=x, w=weight, a=alpha: entmax(x, a) * w,
            {"entmax_bisect": lambda x=x, w=weight, a=alpha: peer.entmax_bisect(x, a) * w},
            (x, alpha),
        )


def _print_errors() -> None:
    """Compare with float64; no fp32 result can be nearer than the float64 one rounded."""
    torch.manual_seed(0)
    print(
        "\nErrors of p, the largest and the root mean square over the support, in units of 1e-8.\n"
    )
    print("| map, n | ours | theirs | float64 rounded |\n|---|---|---|---|")
    for rows, length in SHAPES:
        x = 2.0 * torch.randn(rows, length)
        for name, ours, _, theirs, alpha in MAPS:
            exact = entmax_rows(x.double(), alpha)
            found = (ours(x), theirs(x), exact.float())
            print(f"| {name}, {length} | {' | '.join(_errors(p, exact) for p in found)} |")


def _errors(probs: Tensor, exact: Tensor) -> str:
    error = 1e8 * (probs.double() - exact).abs()
    mean_square = error.square().sum() / (exact > 0).sum()
    return f"{float(error.max()):.1f}, {float(mean_square.sqrt()):.2f}"


def _print_alpha_gradients() -> None:
    """Compare d(sum w p)/d alpha in float64 with central differences of the exact map."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, dtype=torch.float64)
    print("\n| alpha | central difference | ours | entmax_bisect |\n|---|---|---|---|")
    for value in (1.001, 1.01, 1.3, 1.7):
        step = 1e-5
        high, low = (float((w * entmax_rows(x, value + s)).sum()) for s in (step, -step))
        found = []
        for function in (entmax, peer.entmax_bisect):
            alpha = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            (w * function(x, alpha)).sum().backward()
            found.append(float(alpha.grad))
        difference = (high - low) / (2 * step)
        print(f"| {value} | {difference:.6f} | {found[0]:.6f} | {found[1]:.6f} |")


if __name__ == "__main__":
    main()
