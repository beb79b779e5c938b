"""How attention learns of order: added vectors, rotated queries and keys, or biases of scores."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _require_room(length: int, start: int, max_positions: int, kind: str) -> None:
    if start + length > max_positions:
        raise ValueError(
            f"A sequence of {start + length} tokens is longer than the {max_positions} {kind} "
            f"positions; set model.max_positions to {start + length} or more, or cut the input."
        )


class LearnedPositions(nn.Module):
    """Look up one learned vector per position: row `offset + start + i` of a table.

    Args:
        max_positions: The longest sequence.
        d_model: Width of a vector.
        offset: Unused rows before position 0; BART and mBART have 2.
    """

    def __init__(self, max_positions: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(offset + max_positions, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from a normal distribution of variance 1 / d_model."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, length: int, start: int = 0) -> Tensor:
        """Return the vectors of positions start .. start + length - 1, [length, d_model].

        Raises:
            ValueError: If the last position is outside the table.
        """
        _require_room(length, start, self.max_positions, "learned")
        return self.weight[self.offset + start : self.offset + start + length]


class SinusoidalPositions(nn.Module):
    """Hold fixed waves of geometric wavelengths: all sines first, then all cosines.

        P[i, c] = sin(i / 10000 ** (2 c / d)),  P[i, ceil(d / 2) + c] = cos(the same angle)

    The split order (Marian, tensor2tensor) equals the interleaved one of the paper up to a fixed
    permutation of the columns, which the first projection absorbs. The table isn't saved.

    Args:
        max_positions: The longest sequence.
        d_model: Width of a vector.

    Source: Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, section 3.5.
    """

    table: Tensor

    def __init__(self, max_positions: int, d_model: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        columns = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
        steps = torch.arange(max_positions, dtype=torch.float64)
        angles = steps[:, None] * 10_000.0**-columns
        table = torch.cat([angles.sin(), angles.cos()[:, : d_model // 2]], dim=1)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, length: int, start: int = 0) -> Tensor:
        """Return the vectors of positions start .. start + length - 1, [length, d_model].

        Raises:
            ValueError: If the last position is outside the table.
        """
        _require_room(length, start, self.max_positions, "sinusoidal")
        return self.table[start : start + length]


class RotaryAngles(NamedTuple):
    """Cosines and sines of every position's rotation, fp32 [L, D / 2] each."""

    cos: Tensor
    sin: Tensor


def rotary_angles(
    head_dim: int,
    length: int,
    start: int = 0,
    *,
    base: float = 10_000.0,
    device: torch.device | str | None = None,
) -> RotaryAngles:
    """Compute the rotations of positions start .. start + length - 1.

    Column c of position i turns by i / base ** (2 c / D). They are computed rather than stored,
    so there is no longest sequence, and half precision models keep fp32 angles.

    Args:
        head_dim: D, the even width of one head.
        length: Number of positions.
        start: The first position; with a cache, the number of keys in it.
        base: Longest wavelength / (2 pi).
        device: Where the result lives.

    Raises:
        ValueError: If head_dim is odd.

    Source: Su et al. 2021, "RoFormer", arXiv 2104.09864.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}, but rotary positions need an even one.")
    columns = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    steps = torch.arange(start, start + length, device=device, dtype=torch.float32)
    angles = steps[:, None] * base**-columns
    return RotaryAngles(angles.cos(), angles.sin())


def apply_rotary(x: Tensor, angles: RotaryAngles) -> Tensor:
    """Rotate each pair (x[..., c], x[..., D / 2 + c]) by its position's angle.

    The product of a rotated query and a rotated key depends on their distance only.

    Args:
        x: Queries or keys, [..., L, D].
        angles: From `rotary_angles`, for the same L positions.

    Returns:
        A tensor like x.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def relative_distances(
    query_length: int, key_length: int, *, device: torch.device | str | None = None
) -> Tensor:
    """List the distances j - i of a key from a query in the order that attention indexes them.

    Entry o of a relative bias is read by row i and column j = o + i - (query_length - 1). Rows are
    aligned bottom-right, so the query of row i stands at i + key_length - query_length: with a
    cache, one query faces key_length keys and its own is the last. Entry o is therefore the
    distance o - (key_length - 1).

    Returns:
        int64 [query_length + key_length - 1].
    """
    return torch.arange(1 - key_length, query_length, device=device)


def t5_buckets(
    distances: Tensor, num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool
) -> Tensor:
    """Sort distances into buckets: exact when near, logarithmic further off, one beyond.

    Of n buckets (bidirectional: n / 2 for keys before and n / 2 for keys after the query) the first
    n / 2 hold one distance each; the others split n / 2 .. max_distance evenly in the logarithm.

    Args:
        distances: int64 key position - query position, any shape.
        num_buckets: Buckets in all.
        max_distance: From here on, all distances share a bucket.
        bidirectional: False puts every key after the query into bucket 0.

    Returns:
        int64 bucket numbers, same shape.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", arXiv 1910.10683.
    """
    if bidirectional:
        num_buckets //= 2
        base = (distances > 0).long() * num_buckets
        far = distances.abs()
    else:
        base = torch.zeros_like(distances)
        far = (-distances).clamp(min=0)
    exact = num_buckets // 2
    share = (far.float() / exact).clamp(min=1.0).log() / math.log(max_distance / exact)
    coarse = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return base + torch.where(far < exact, far, coarse)


class T5RelativeBias(nn.Module):
    """Learn one bias per head and distance bucket; all layers of a stack share it.

    Args:
        num_heads: Query heads.
        num_buckets: Rows of the table, a multiple of 4.
        max_distance: From here on, all distances share a bucket; more than num_buckets / 2.
        bidirectional: True for encoders; False for causal decoders, where no key comes after.

    Raises:
        ValueError: If num_buckets or max_distance can't be used.

    Source: Raffel et al. 2020, arXiv 1910.10683.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        if num_buckets < 4 or num_buckets % 4 or max_distance <= num_buckets // 2:
            raise ValueError(
                f"num_buckets is {num_buckets} and max_distance {max_distance}, but num_buckets "
                "must be a multiple of 4 and max_distance more than half of it."
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start almost without a bias."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """Return the bias of every distance, [H, query_length + key_length - 1], differentiable."""
        distances = relative_distances(query_length, key_length, device=self.weight.device)
        buckets = t5_buckets(
            distances, self.num_buckets, self.max_distance, bidirectional=self.bidirectional
        )
        return F.embedding(buckets, self.weight).t()


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head, a geometric series that ends at 2 ** -8.

    With n heads, a power of two, head h has 2 ** (-8 (h + 1) / n). Other counts take the series of
    the next lower power of two, and then every second slope of the next higher one.

    Source: Press et al. 2022, "Train Short, Test Long", arXiv 2108.12409.
    """
    lower: int = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    finer = [2.0 ** (-8.0 * (h + 1) / (2 * lower)) for h in range(0, 2 * lower, 2)]
    return slopes + finer[: num_heads - lower]


def alibi_bias(
    num_heads: int,
    query_length: int,
    key_length: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Penalise distance: bias = -slope * |key position - query position|.

    The absolute value makes it symmetric, as an encoder needs; a causal decoder, where no key comes
    after the query, gets the form of the paper.

    Returns:
        fp32 [H, query_length + key_length - 1].

    Source: Press et al. 2022, arXiv 2108.12409.
    """
    slopes = torch.tensor(alibi_slopes(num_heads), device=device)
    return -slopes[:, None] * relative_distances(query_length, key_length, device=device).abs()
