"""AdaSplash-2 of the package `adasplash`, made to run in Triton's interpreter."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import triton.language as tl
from torch import Tensor

INSTALL = (
    "The peer is missing: pip install --no-deps adasplash==0.2.2 (with --target FOLDER and "
    "PYTHONPATH=FOLDER to keep it apart)."
)
# Of its first pass, which its autotuner chooses on a GPU; the others are fixed at 64 x 64. Smaller
# tiles visit less above the diagonal, larger ones read the keys less often.
FIRST_BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64}


def interpreted_adasplash() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return adasplash_v2(q, k, v): causal, alpha 1.5, scale D ** -0.5, its default settings.

    The interpreter knows no libdevice functions and no inline assembly, so they get stand-ins,
    and no autotuner, so the first pass gets its blocks here.

    Raises:
        SystemExit: the package isn't installed.
    """
    try:
        module: Any = import_module("adasplash.adasplash_v2")
    except ModuleNotFoundError as error:
        raise SystemExit(INSTALL) from error
    module.float2int_rd = _floor
    module.popc = _set_bits
    module.get_next_block = _place_of_bit
    module._get_tau = _WithBlocks(module._get_tau)
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = module.sparse_attn
    return attend


class _WithBlocks:
    """A kernel that is launched with FIRST_BLOCKS, as by an autotuner."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Callable[[dict[str, int]], tuple[int, ...]]) -> Any:
        launch = self.kernel[grid(FIRST_BLOCKS)]
        return lambda *args: launch(*args, **FIRST_BLOCKS)


def _floor(x: Any) -> Any:
    return tl.floor(x).to(tl.int32)


def _word(bits: Any) -> int:
    return int(bits.handle.data.item()) & 0xFFFFFFFF


def _set_bits(bits: Any) -> int:
    return _word(bits).bit_count()


def _place_of_bit(bits: Any, index: Any) -> int:
    """Return the place of set bit number `index`, as PTX's fns does from place 0 upwards."""
    word = _word(bits)
    places = [place for place in range(32) if word >> place & 1]
    return places[int(index)]
