"""Time attention on the CPU beside torch's fused softmax and dense attention with `entmax`.

    python benchmarks/attention.py

Forward + backward, fp32. Each figure is the median of repeats that take turns; peer / ours is above
1 where ours is quicker.
"""

from collections.abc import Callable, Iterator

import entmax as peer
import torch
from timing import Case, header, options, run
from torch import Tensor
from torch.nn import functional as F

from sparseformer.functional import entmax_attention

# Batch, heads, length, width: many short sequences, then one long one.
SHAPES = ((256, 4, 20, 32), (4, 8, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64), (1, 4, 2048, 64))


def main() -> None:
    """Print one line per shape and alpha."""
    chosen = options(__doc__)
    print(header(chosen.threads, ("entmax",)), end="\n\n")
    run(_cases(), chosen)


def _cases() -> Iterator[Case]:
    for shape in SHAPES:
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        alpha = torch.linspace(1.2, 1.8, shape[1]).requires_grad_()
        scale = shape[3] ** -0.5

        def dense(mapping: Callable[[Tensor], Tensor], q=q, k=k, v=v, scale=scale) -> Tensor:
            return mapping(q @ k.mT * scale) @ v

        def ours(alpha, q=q, k=k, v=v):
            return lambda: entmax_attention(q, k, v, alpha)

        def fused(q=q, k=k, v=v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

        def bisected(alpha=alpha, dense=dense) -> Tensor:
            return dense(lambda s: peer.entmax_bisect(s, alpha[:, None, None]))

        size, inputs = str(list(shape)), (q, k, v)
        yield Case(f"alpha 1, {size}", ours(1.0), {"F.scaled_dot_product_attention": fused}, inputs)
        exact = {"dense entmax15": lambda dense=dense: dense(peer.entmax15)}
        yield Case(f"alpha 1.5, {size}", ours(1.5), exact, inputs)
        learned = {"dense entmax_bisect": bisected}
        yield Case(f"alpha learned, {size}", ours(alpha), learned, (*inputs, alpha))


if __name__ == "__main__":
    main()
