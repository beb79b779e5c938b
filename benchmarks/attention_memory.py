"""Print what attention keeps for the backward pass beyond q, k and v, ours and its peers'.

    python benchmarks/attention_memory.py

Bytes per query and head in 16 bits. Ours and PyTorch's fused softmax are measured on the tensors
that autograd saves, without computing anything; AdaSplash's are read from the code of 0.2.2.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from sparseformer.functional import entmax_attention

DIM = 64
LENGTHS = (4096, 65536)
DTYPE = torch.bfloat16
HEADS = 2
TILE, WORD = 64, 32


def main() -> None:
    """Print the table of docs/attention.md."""
    # Triton reads this when it is imported, which nothing here has done yet.
    os.environ["TRITON_INTERPRET"] = "1"
    print("\n".join(table()))


def table() -> list[str]:
    """Return the lines of the table; the Triton backend must be interpreted."""
    rows: list[tuple[str, str, Callable[[int], float]]] = [
        ("ours, Triton", "sum u v / sum u, t, a bit per tile of 64 x 64", _measured("triton")),
        ("ours, PyTorch", "max(s), t", _measured("pytorch")),
        ("AdaSplash-2", "sum u v / sum u, tau, a bit per tile of 64 x 64", adasplash_2),
        ("AdaSplash", "sum u v / sum u, tau, 4 bytes per active tile of 16 x 16", adasplash),
        ("FlashAttention", "O, logsumexp", _measured("fused softmax")),
        ("dense `entmax15`", "p", lambda length: length * DTYPE.itemsize),
    ]
    names = " | ".join(f"L = {length}" for length in LENGTHS)
    lines = [f"| | kept beyond q, k, v | {names} |", "|---" * (2 + len(LENGTHS)) + "|"]
    for name, what, size in rows:
        cells = " | ".join(f"{size(length):.1f}" for length in LENGTHS)
        lines.append(f"| {name} | {what} | {cells} |")
    return lines


def measured(system: str, length: int, dtype: torch.dtype = DTYPE, dim: int = DIM) -> float:
    """Return the bytes per query and head that autograd saves beyond q, k and v.

    Args:
        system: "triton" or "pytorch", a backend of ours, or "fused softmax".
        length: of queries and keys.
        dtype: of q, k and v.
        dim: D and Dv.
    """
    with FakeTensorMode():
        shape = (1, HEADS, length, dim)
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        kept: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            if system == "fused softmax":
                F.scaled_dot_product_attention(*inputs, is_causal=True)
            else:
                entmax_attention(*inputs, 1.5, is_causal=True, backend=system)
    given = sum(x.numel() for x in inputs) * dtype.itemsize
    return (sum(x.numel() * x.element_size() for x in kept) - given) / (HEADS * length)


def _measured(system: str) -> Callable[[int], float]:
    return lambda length: measured(system, length)


def meant(length: int, dtype: torch.dtype = DTYPE, dim: int = DIM) -> float:
    """Return what the Triton backend is meant to keep where a tile is 64 x 64: D to 64, 16 bits."""
    return dim * dtype.itemsize + 4 + _bits(length)


def adasplash_2(length: int) -> float:
    """Return bytes of `out2`, `taus` and `bmask` of adasplash_v2.py, whose rows come in 32s."""
    blocks = -(-length // TILE)
    rows = max(WORD, -(-blocks // WORD) * WORD)
    return DIM * DTYPE.itemsize + 4 + _bits(length) * rows / blocks


def adasplash(length: int, active_share: float = 0.5) -> float:
    """Return bytes of `out2`, `taus`, two int16 indices per active tile and two counts per block.

    Args:
        length: of queries and keys.
        active_share: of all 16 x 16 tiles; a causal mask leaves half of them.
    """
    blocks = length / 16
    return DIM * DTYPE.itemsize + 4 + 4 * active_share * blocks / 16 + 2 * 4 / 16


def _bits(length: int) -> float:
    blocks = -(-length // TILE)
    return blocks * -(-blocks // WORD) * 4 / length


if __name__ == "__main__":
    main()
