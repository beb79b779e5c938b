"""The configuration that a kernel is launched with: timed on request, smaller where a card asks."""

import json
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseformer.kernels.common.backends import is_interpreting
from sparseformer.kernels.common.folders import cache_folder

C = TypeVar("C")
R = TypeVar("R")
Key = tuple[str, torch.device, tuple[Hashable, ...]]

logger = logging.getLogger("sparseformer")

SWITCH = "SPARSEFORMER_AUTOTUNE"
# Milliseconds of warming up and of timing each candidate.
WARMUP, REPEAT = 10, 50
_STORE = "launches.json"
_chosen: dict[Key, Any] = {}


def launch_chosen(
    kernel: str,
    device: torch.device,
    case: tuple[Hashable, ...],
    candidates: Sequence[C],
    run: Callable[[C], R],
    *,
    larger: Sequence[C] = (),
    restored: Sequence[Tensor] = (),
) -> R:
    """Launch a kernel with the configuration chosen for a case, and return what `run` returns.

    That is the first candidate, and the next one where a card has too little shared memory, which
    is logged once. With the environment variable SPARSEFORMER_AUTOTUNE=1 each configuration is
    timed on a GPU the first time that a case is met, and the quickest is kept, also in the user's
    cache folder. While a CUDA graph is captured nothing can be timed; under Triton's interpreter
    nothing is.

    Args:
        kernel: its name, in messages and in the cache.
        device: where it runs.
        case: everything else that decides which configuration is the quickest.
        candidates: configurations, each smaller in shared memory than the one before.
        run: launches the kernel; it must write the same each time, except into `restored`.
        larger: configurations that are only timed.
        restored: what the kernel both reads and writes, set back before each timed launch.
    """
    key = (kernel, device, case)
    choice = _chosen.get(key)
    if choice is None and _may_time(device):
        choice = _chosen[key] = _quickest(key, (*candidates, *larger), run, restored)
    if choice is None:
        choice = candidates[0]
    following = candidates[candidates.index(choice) + 1 :] if choice in candidates else candidates
    for smaller in following:
        try:
            return run(choice)
        except _out_of_resources() as error:
            _say_once(kernel, device, str(error), repr(smaller))
            choice = _chosen[key] = smaller
    return run(choice)


def _quickest(
    key: Key, candidates: Sequence[C], run: Callable[[C], Any], restored: Sequence[Tensor]
) -> C | None:
    """Return the quickest of the candidates that the card can run, None if it can run none."""
    name = _stored_name(key)
    stored = _stored().get(name)
    for candidate in candidates:
        if repr(candidate) == stored:
            return candidate
    before = [tensor.clone() for tensor in restored]

    def restore() -> None:
        for tensor, copy in zip(restored, before, strict=True):
            tensor.copy_(copy)

    times: dict[float, C] = {}
    for candidate in candidates:

        def launch(candidate: C = candidate) -> None:
            restore()
            run(candidate)

        try:
            times.setdefault(_time(launch), candidate)
        except _out_of_resources():
            continue
    restore()
    if not times:
        return None
    choice = times[min(times)]
    _store(name, repr(choice))
    return choice


def _may_time(device: torch.device) -> bool:
    wanted = os.environ.get(SWITCH, "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {wanted!r}, but it must be '0' or '1'.")
    if wanted == "0" or device.type != "cuda" or is_interpreting():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _time(launch: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return float(do_bench(launch, warmup=WARMUP, rep=REPEAT, return_mode="median"))


def _out_of_resources() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    failure: type[Exception] = OutOfResources
    return failure


@cache
def _say_once(kernel: str, device: torch.device, reason: str, smaller: str) -> None:
    logger.warning(
        "%s runs with %s on %s, which is too small for the usual configuration (%s): nothing needs "
        "to be done, it is only slower.",
        kernel,
        smaller,
        _card(device),
        reason,
    )


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _stored_name(key: Key) -> str:
    import triton

    kernel, device, case = key
    return f"{_card(device)}, triton {triton.__version__}: {kernel} {case}"


def _stored() -> dict[str, str]:
    """Return what earlier runs have chosen; a missing or damaged file holds nothing."""
    try:
        content = json.loads((cache_folder() / _STORE).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _store(name: str, choice: str) -> None:
    """Keep a choice for later runs; where the folder can't be written, for this one only."""
    try:
        path = cache_folder() / _STORE
        private = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        private.write_text(json.dumps(_stored() | {name: choice}, indent=1), encoding="utf-8")
        private.replace(path)
    except (OSError, RuntimeError) as error:
        # RuntimeError: the user has no home.
        logger.info("The quickest configuration of a kernel isn't kept: %s.", error)
