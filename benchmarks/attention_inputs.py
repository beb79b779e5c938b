"""Queries and keys whose scores have a known structure, and what dense attention makes of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.entmax.reference import probabilities, solve_threshold

DIM = 64
ALPHA = 1.5
# Every so many keys one has a score as large as that of the nearest ones, for every query.
GLOBAL_STEP = 512
# Score of the nearest keys, and how many keys away it has fallen to 0.6 of that.
PEAK, WIDTH = 12.0, 64.0
FREQUENCIES = 24
# Rows of the dense matrix at once.
ROWS = 512


class Inputs(NamedTuple):
    """One head in fp16, [1, 1, L, D]; column 0 of value is 1, so that of the output is sum p."""

    query: Tensor
    key: Tensor
    value: Tensor


def gaussian(length: int, std: float) -> Inputs:
    """Draw q and k from a normal distribution of variance `std`: so is the scores' deviation."""
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(length, DIM, generator=draw) * std**0.5 for _ in range(2))
    return _inputs(query, key, draw)


def local(length: int, has_global: bool) -> Inputs:
    """Draw scores that fall off with distance, with noise, and some keys that all queries see.

    Random Fourier features of the position give PEAK exp(-distance^2 / (2 WIDTH^2)) on average.
    """
    draw = torch.Generator().manual_seed(0)
    places = torch.arange(length)
    angles = places[:, None] * torch.randn(FREQUENCIES, generator=draw) / WIDTH
    waves = torch.cat((angles.cos(), angles.sin()), 1) * (PEAK / FREQUENCIES) ** 0.5
    marked = (places % GLOBAL_STEP == 0).float() * has_global
    noise = DIM - 2 * FREQUENCIES - 1

    def rows(features: Tensor, global_part: Tensor) -> Tensor:
        extra = torch.randn(length, noise, generator=draw) * noise**-0.25
        return torch.cat((features, global_part[:, None], extra), 1) * DIM**0.25

    query = rows(waves, torch.full((length,), PEAK**0.5))
    # A marked key has no place of its own, or its neighbours would see it twice as well.
    key = rows(waves * (1 - marked)[:, None], marked * PEAK**0.5)
    return _inputs(query, key, draw)


def _inputs(query: Tensor, key: Tensor, draw: torch.Generator) -> Inputs:
    value = torch.randn(len(key), DIM, generator=draw)
    value[:, 0] = 1.0
    return Inputs(*(x.half()[None, None] for x in (query, key, value)))


INPUTS: dict[str, Callable[[int], Inputs]] = {
    "std 0.05": lambda length: gaussian(length, 0.05),
    "std 1": lambda length: gaussian(length, 1.0),
    "std 3": lambda length: gaussian(length, 3.0),
    "std 8": lambda length: gaussian(length, 8.0),
    "local": lambda length: local(length, False),
    "local + global": lambda length: local(length, True),
}


class Dense(NamedTuple):
    """What float64 gives: the output, keys with p > 0 for a query, and active tiles by size."""

    output: Tensor
    support: float
    shares: dict[int, float]


def dense_attention(inputs: Inputs, blocks: tuple[int, ...]) -> Dense:
    """Compute causal attention, and the share of visible tiles with a p > 0 for each block size."""
    query, key, value = (x[0, 0].double() for x in inputs)
    length = len(query)
    outputs, active = [], torch.zeros(length, length, dtype=torch.bool)
    for start in range(0, length, ROWS):
        rows = slice(start, min(start + ROWS, length))
        scores = query[rows] @ key.T * DIM**-0.5
        future = torch.arange(length) > torch.arange(length)[rows, None]
        scores = scores.masked_fill(future, float("-inf"))
        alpha = torch.tensor(ALPHA, dtype=torch.float64)
        probs, _ = probabilities(scores, solve_threshold(scores, alpha), alpha)
        outputs.append(probs @ value)
        active[rows] = probs > 0
    shares = {size: _share(active, size) for size in blocks}
    return Dense(torch.cat(outputs), active.sum(1).double().mean().item(), shares)


def _share(active: Tensor, size: int) -> float:
    tiles = active.unflatten(1, (-1, size)).unflatten(0, (-1, size)).any(3).any(1)
    count = len(tiles) * (len(tiles) + 1) // 2
    return tiles.sum().item() / count
