"""How the backward kernels are launched: keys at once, warps and stages, by width and options."""

from functools import cache
from typing import NamedTuple

import torch

from sparseformer.kernels.common.launch import (
    Launch,
    RoomyLaunch,
    larger_launches,
    smaller_launches,
)
from sparseformer.kernels.entmax_attention.blocks import padded_dim

# The fewest that tensor cores multiply.
MIN_COLUMNS = 16


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
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    eps: float | None,
    has_extras: bool,
    has_warp_groups: bool = False,
) -> Plans:
    """Return plans that keep every kernel in registers on every GPU of the compile gate.

    Args:
        dtype: of query, key and value.
        dim: D.
        value_dim: Dv.
        eps: alpha - 1 where it is one of SHORT_EPS, else None.
        has_extras: whether there is a relative bias or dropout, whose indices take registers.
        has_warp_groups: of multiplies_by_warp_groups; else the plans fit any GPU.
    """
    width = max(64, padded_dim(dim), padded_dim(value_dim))
    if dtype.itemsize > 2:
        return _WIDE_TYPES[width]
    if has_extras:
        return _WITH_EXTRAS[width]
    if width > 64:
        return _PLAIN[width]
    if not has_warp_groups:
        return _NARROW
    return _NARROW_SOFTMAX_BY_GROUPS if eps == 0.0 else _NARROW_BY_GROUPS


@cache
def smaller_plans(plan: Plan) -> tuple[Plan, ...]:
    """Return the plan and those that need less shared memory: fewer buffers, then fewer keys."""
    plans = [plan._replace(launch=launch) for launch in smaller_launches(plan.launch)]
    columns = plan.columns // 2
    while columns >= MIN_COLUMNS:
        plans.append(plan._replace(columns=columns, launch=plans[-1].launch))
        columns //= 2
    return tuple(plans)


@cache
def larger_plans(plan: Plan, most: int) -> tuple[Plan, ...]:
    """Return what may be quicker on some cards, with `most` keys at once or fewer."""
    plans = [plan._replace(launch=launch) for launch in larger_launches(plan.launch)]
    if plan.columns * 2 <= most:
        plans.append(plan._replace(columns=plan.columns * 2))
    return tuple(plans)


def _plans(*settings: tuple[int, int, int]) -> Plans:
    """Return plans of (columns, warps, stages) for query, key and bias."""
    return Plans(*(Plan(columns, Launch(warps, stages)) for columns, warps, stages in settings))


# By the larger width; a bias always counts as an extra, so its plan here is never read.
_PLAIN = {
    128: _plans((32, 4, 2), (32, 4, 2), (16, 8, 2)),
    256: _plans((16, 8, 2), (16, 8, 2), (16, 8, 2)),
}
# All keys of a tile, so that its queries are read once, by half of the queries.
_NARROW = Plans(Plan(32, Launch(4)), Plan(64, Launch(4), rows=32), Plan(32, Launch(8)))
# Whole tiles, whose operands are read from shared memory half as often; elsewhere they would spill.
_NARROW_BY_GROUPS = _NARROW._replace(query=Plan(64, Launch(4)), key=Plan(64, Launch(4)))
_NARROW_SOFTMAX_BY_GROUPS = _NARROW._replace(key=Plan(64, Launch(4)))
_WITH_EXTRAS = {
    64: _plans((32, 4, 2), (32, 4, 2), (32, 8, 2)),
    128: _plans((16, 8, 2), (16, 8, 2), (16, 8, 2)),
    256: _plans((16, 8, 2), (16, 8, 2), (16, 8, 2)),
}
# fp32 has no tensor cores here; more warps share its products instead.
_WIDE_TYPES = {
    64: _plans((16, 8, 1), (16, 4, 1), (32, 4, 1))._replace(query=Plan(16, RoomyLaunch(8, 1))),
    128: _plans((16, 4, 1), (16, 4, 1), (16, 4, 1)),
    256: _plans((16, 16, 1), (16, 16, 1), (16, 8, 1))._replace(query=Plan(16, RoomyLaunch(16, 1))),
}
