"""How the backward kernels are launched: keys at once, warps and stages, by width and options."""

from typing import NamedTuple

import torch

from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax_attention.blocks import padded_dim


class Plan(NamedTuple):
    """Keys and queries that a kernel computes at once, at most those of a tile, and its launch."""

    columns: int
    launch: Launch
    rows: int | None = None


class Plans(NamedTuple):
    """The plan of each kernel."""

    query: Plan
    key: Plan
    bias: Plan


def plans_for(
    dtype: torch.dtype, dim: int, value_dim: int, eps: float | None, has_extras: bool
) -> Plans:
    """Return plans that keep every kernel in registers on every GPU of the compile gate.

    Args:
        dtype: of query, key and value.
        dim: D.
        value_dim: Dv.
        eps: alpha - 1 where its powers are short, else None.
        has_extras: whether there is a relative bias or dropout, whose indices take registers.
    """
    width = max(64, padded_dim(dim), padded_dim(value_dim))
    if dtype.itemsize > 2:
        return _WIDE_TYPES[width]
    if has_extras:
        return _WITH_EXTRAS[width]
    return _SHORT_POWERS if eps is not None and width == 64 else _PLAIN[width]


def _plans(*settings: tuple[int, int, int]) -> Plans:
    """Return plans of (columns, warps, stages) for query, key and bias."""
    return Plans(*(Plan(columns, Launch(warps, stages)) for columns, warps, stages in settings))


# By the larger width; a bias always counts as an extra, so its plan here is never read.
_PLAIN = {
    64: _plans((32, 4, 2), (32, 4, 2), (32, 8, 2)),
    128: _plans((32, 4, 1), (32, 8, 2), (16, 8, 2)),
    256: _plans((16, 8, 2), (16, 8, 2), (16, 8, 2)),
}
# All keys of a tile, so that its queries are read once, by half of the queries.
_SHORT_POWERS = _PLAIN[64]._replace(key=Plan(64, Launch(4), rows=32))
_WITH_EXTRAS = {
    64: _plans((32, 4, 2), (16, 4, 2), (32, 8, 2)),
    128: _plans((16, 8, 2), (16, 8, 2), (16, 8, 2)),
    256: _plans((16, 8, 2), (16, 8, 2), (16, 8, 2)),
}
# fp32 has no tensor cores here; more warps share its products instead.
_WIDE_TYPES = {
    64: _plans((16, 8, 1), (16, 4, 1), (32, 4, 1)),
    128: _plans((16, 4, 1), (16, 4, 1), (16, 4, 1)),
    256: _plans((16, 16, 1), (16, 16, 1), (16, 8, 1)),
}
