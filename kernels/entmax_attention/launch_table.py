"""How the forward kernels are launched: which one, warps, and when t is close enough."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.common.launch import (
    Launch,
    RoomyLaunch,
    larger_launches,
    next_power_of_2,
    smaller_launches,
)
from sparseformer.kernels.common.tuning import launch_chosen
from sparseformer.kernels.entmax_attention.arguments import Arguments
from sparseformer.kernels.entmax_attention.blocks import Blocks, blocks_for, padded_dim
from sparseformer.kernels.entmax_attention.saved import input_dtype

# How far sum p may be from 1 before the last step of t, which is folded in, by the dtype of the
# inputs. With a backward pass to come it bounds the error of delta, else that of the output.
EXCESS_KEPT = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
EXCESS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
# Rows of a decode program: the query heads of a key head times Lq.
MAX_DECODE_ROWS = 16
DECODE_LAUNCH = Launch(num_warps=4, num_stages=2)


class Plan(NamedTuple):
    """Settings of the two passes.

    Attributes:
        depth: scores that the sketch keeps of each lane, 1 to 4.
        close: of close_enough.
        excess: how far sum p may be from 1 before the last step.
        doubt: what the sketch may seem to have dropped before t is refined; the last pass checks
            against `excess` and starts again if this was too much.
        sketch_launch: warps and stages of the first pass.
        launch: those of the last pass.
    """

    depth: int
    close: float
    excess: float
    doubt: float
    sketch_launch: Launch
    launch: Launch


def plan_for(
    dtype: torch.dtype,
    width: int,
    eps: float | None,
    keep: bool,
    has_bias: bool,
    has_dropout: bool,
) -> Plan:
    """Return the settings of the two passes.

    Args:
        dtype: of the inputs.
        width: the larger of D and Dv.
        eps: alpha - 1, or None if it is a tensor.
        keep: whether a backward pass follows.
        has_bias: whether scores have a relative bias.
        has_dropout: whether weights are dropped.
    """
    excess = _excess(dtype, keep)
    # Of rows with wide supports the sketch drops about twice what it seems.
    doubt = excess / 2.0
    # Measured by compiling for every supported GPU: none of these spills.
    is_narrow = width <= 64 and dtype.itemsize <= 2
    depth = 4 - has_bias * (2 if is_narrow and eps is None else 1)
    is_large = width > 64 or (eps is None and dtype.itemsize > 2)
    warps = 8 if is_large or has_bias or has_dropout else 4
    if width > 128 and not keep:
        warps = 4
    sketch_warps = 4 if blocks_for(dtype, width, width) == Blocks(32, 32) else 8
    sketch_launch = RoomyLaunch(sketch_warps, 3 if is_narrow and eps is None else 2)
    close = close_enough(dtype, keep)
    return Plan(depth, close, excess, doubt, sketch_launch, _launch(warps, eps))


def close_enough(dtype: torch.dtype, keep: bool) -> float:
    """Return how far sum p may be from 1 before a Newton step that shall be the last one.

    The step leaves about a quarter of its square, which is a quarter of the excess.
    """
    return float(_excess(dtype, keep) ** 0.5)


def _excess(dtype: torch.dtype, keep: bool) -> float:
    return (EXCESS_KEPT if keep else EXCESS)[dtype]


def _launch(num_warps: int, eps: float | None) -> Launch:
    # The powers of a learned alpha need the registers.
    return RoomyLaunch(num_warps) if eps is None else Launch(num_warps)


def launch_case(arguments: Arguments) -> tuple[Hashable, ...]:
    """Return all that decides which launch of a kernel is the quickest, lengths by powers of 2."""
    query, key = arguments.query, arguments.key
    batch, heads, num_queries, dim = query.shape
    num_keys = key.shape[2]
    sizes = (batch * heads, num_queries, num_keys)
    # How far a query sees to either side; nothing to its right under a causal mask.
    band = (min(arguments.left, num_keys), min(arguments.right, num_keys))
    return (
        str(input_dtype(arguments)),
        dim,
        arguments.value.shape[3],
        heads // key.shape[1],
        *(next_power_of_2(n) for n in (*sizes, *band)),
        "learned" if arguments.alpha is not None else arguments.parameter,
        arguments.relative_bias is not None,
        arguments.dropout_p > 0.0,
        arguments.key_start is not None or arguments.key_end is not None,
        arguments.cu_seqlens_q is not None,
    )


def choose_launch(
    kernel: str,
    default: Launch,
    run: Callable[[Launch], None],
    output: Tensor,
    case: tuple[Hashable, ...],
    restored: Sequence[Tensor] = (),
) -> None:
    """Run a forward kernel with the launch that suits the card.

    The depth of the sketch and the tile aren't tried: both move work to other kernels.

    Args:
        kernel: its name, for messages.
        default: the launch from this table, that serves every card of the compile gate.
        run: launches the kernel.
        output: on the kernel's device.
        case: of launch_case, and whether a backward pass follows.
        restored: what the kernel both reads and writes.
    """
    launch_chosen(
        f"attention forward {kernel}",
        output.device,
        case,
        smaller_launches(default),
        run,
        larger=larger_launches(default),
        restored=restored,
    )


def rounding_of(dtype: torch.dtype) -> float:
    """Return the share of t below which a step of it is rounding."""
    return 2.0**-50 if dtype == torch.float64 else 2.0**-22


def one_tile_span(arguments: Arguments, blocks: Blocks) -> int | None:
    """Return the keys of a tile that holds all that a block of queries sees, or None.

    A power of 2, so that all of it fits in registers next to the output.
    """
    num_keys = arguments.key.shape[2]
    seen = num_keys
    if arguments.cu_seqlens_q is None:
        # A band of keys, from the multiple of blocks.keys below it.
        band = arguments.left + arguments.right + blocks.queries + blocks.keys - 1
        seen = min(num_keys, band)
    span = max(blocks.keys, next_power_of_2(seen))
    width = max(arguments.query.shape[3], arguments.value.shape[3])
    has_extras = arguments.relative_bias is not None or arguments.dropout_p > 0.0
    return span if span <= max_span(input_dtype(arguments), width, has_extras) else None


def max_span(dtype: torch.dtype, width: int, has_extras: bool) -> int:
    """Return the most keys that a tile of one pass may have, by the registers it takes."""
    if dtype.itemsize <= 2:
        return 64 if width <= 64 and has_extras else 128
    return 64 if width <= 128 else 32


def one_tile_launch(span: int, blocks: Blocks, eps: float | None) -> Launch:
    """Return warps and stages for a tile of `span` keys."""
    return _launch(8 if span >= 2 * blocks.keys or eps is None else 4, eps)


def decode_blocks(arguments: Arguments) -> Blocks | None:
    """Return rows and keys of a program if few queries look at many keys, else None."""
    query, key = arguments.query, arguments.key
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    if rows > MAX_DECODE_ROWS:
        return None
    width = max(query.shape[3], arguments.value.shape[3])
    return Blocks(padded_dim(rows), decode_keys(input_dtype(arguments), width))


def decode_keys(dtype: torch.dtype, width: int) -> int:
    """Return the keys of a decode program's tile, by the registers it takes."""
    return 64 if padded_dim(width) * dtype.itemsize <= 256 else 32
