"""The choice of a kernel's configuration: timed on request, smaller where a card is too small.

No GPU is needed: the kernels here are functions, and the clock is a list of times.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sparseformer.kernels.common import tuning
from sparseformer.kernels.common.launch import (
    Launch,
    larger_launches,
    multiplies_by_warp_groups,
    smaller_launches,
)
from sparseformer.kernels.common.tuning import launch_chosen
from sparseformer.kernels.entmax_attention.backward_plans import (
    Plan,
    larger_plans,
    plans_for,
    smaller_plans,
)
from sparseformer.kernels.entmax_attention.checks import Options, entmax_arguments
from sparseformer.kernels.entmax_attention.launch_table import launch_case

CPU = torch.device("cpu")
BIG, MIDDLE, SMALL = 3, 2, 1


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._say_once.cache_clear()


class Kernel:
    """Something to launch, on a card with room for configurations up to `room`."""

    def __init__(self, room: int = BIG) -> None:
        self.room = room
        self.launched: list[int] = []

    def __call__(self, size: int) -> int:
        self.launched.append(size)
        if size > self.room:
            raise OutOfResources(size * 65_536, self.room * 65_536, "shared memory")
        return 10 * size


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float], Kernel], None]:
    """Ask for timing, with these milliseconds for each configuration."""

    def start(times: dict[int, float], kernel: Kernel) -> None:
        def time(launch: Callable[[], None]) -> float:
            launch()
            launch()
            return times[kernel.launched[-1]]

        monkeypatch.setattr(tuning, "_may_time", lambda _: True)
        monkeypatch.setattr(tuning, "_time", time)

    return start


def _launch(kernel: Callable[[int], int], case: tuple[int, ...] = (), **options: object) -> int:
    return launch_chosen("tested", CPU, case, (BIG, MIDDLE, SMALL), kernel, **options)


def test_the_first_configuration_is_launched_once_and_its_result_returned() -> None:
    kernel = Kernel()
    assert _launch(kernel) == 10 * BIG
    assert kernel.launched == [BIG]


def test_a_small_card_gets_the_next_configuration_that_fits_and_keeps_it() -> None:
    kernel = Kernel(room=SMALL)
    assert [_launch(kernel), _launch(kernel)] == [10 * SMALL, 10 * SMALL]
    assert kernel.launched == [BIG, MIDDLE, SMALL, SMALL]


def test_another_case_starts_from_the_first_configuration() -> None:
    kernel = Kernel(room=MIDDLE)
    _launch(kernel, (1,))
    _launch(kernel, (2,))
    assert kernel.launched == [BIG, MIDDLE, BIG, MIDDLE]


def test_a_card_that_is_too_small_for_all_says_so() -> None:
    with pytest.raises(OutOfResources, match="Hardware limit: 0"):
        _launch(Kernel(room=0))


def test_other_errors_are_not_hidden() -> None:
    def broken(size: int) -> int:
        raise ValueError(f"no {size}")

    with pytest.raises(ValueError, match="no 3"):
        _launch(broken)


def test_a_smaller_configuration_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparseformer"):
        for case in range(3):
            _launch(Kernel(room=MIDDLE), (case,))
    (record,) = caplog.records
    assert record.name == "sparseformer"
    for part in ("tested runs with 2 on cpu", "196608", "131072", "nothing needs to be done"):
        assert part in record.getMessage()


def test_the_quickest_configuration_is_kept(timed: Callable[..., None]) -> None:
    kernel = Kernel()
    timed({BIG: 2.0, MIDDLE: 1.0, SMALL: 3.0}, kernel)
    assert _launch(kernel) == 10 * MIDDLE
    kernel.launched.clear()
    assert _launch(kernel) == 10 * MIDDLE
    assert kernel.launched == [MIDDLE]


def test_larger_configurations_are_only_timed(timed: Callable[..., None]) -> None:
    kernel = Kernel(room=9)
    assert _launch(kernel, larger=(4,)) == 10 * BIG
    timed({BIG: 2.0, MIDDLE: 3.0, SMALL: 3.0, 4: 1.0}, kernel)
    assert _launch(kernel, (1,), larger=(4,)) == 40


def test_what_does_not_fit_is_not_chosen(timed: Callable[..., None]) -> None:
    kernel = Kernel(room=MIDDLE)
    timed({BIG: 0.0, MIDDLE: 2.0, SMALL: 1.0}, kernel)
    assert _launch(kernel, larger=(4,)) == 10 * SMALL


def test_a_later_process_reads_the_choice(timed: Callable[..., None], tmp_path: Path) -> None:
    kernel = Kernel()
    timed({BIG: 2.0, MIDDLE: 1.0, SMALL: 3.0}, kernel)
    _launch(kernel)
    (stored,) = json.loads((tmp_path / "sparseformer/launches.json").read_text()).values()
    assert stored == repr(MIDDLE)
    tuning._chosen.clear()
    kernel.launched.clear()
    assert _launch(kernel) == 10 * MIDDLE
    assert kernel.launched == [MIDDLE]


@pytest.mark.parametrize("content", ["", "[1]", "{bad", '{"tested": "import os"}'])
def test_a_damaged_cache_is_timed_anew(
    content: str, timed: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "sparseformer").mkdir()
    (tmp_path / "sparseformer/launches.json").write_text(content)
    kernel = Kernel()
    timed({BIG: 2.0, MIDDLE: 1.0, SMALL: 3.0}, kernel)
    assert _launch(kernel) == 10 * MIDDLE


def test_a_cache_that_cannot_be_written_changes_nothing(
    timed: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "sparseformer").write_text("a file where the folder should be")
    kernel = Kernel()
    timed({BIG: 2.0, MIDDLE: 1.0, SMALL: 3.0}, kernel)
    assert _launch(kernel) == 10 * MIDDLE


def test_timing_leaves_what_a_kernel_changes_as_it_was(timed: Callable[..., None]) -> None:
    state = torch.zeros(2)
    kernel, seen = Kernel(), []

    def adds(size: int) -> int:
        seen.append(float(state[0]))
        state.add_(1.0)
        return kernel(size)

    timed({BIG: 2.0, MIDDLE: 1.0, SMALL: 3.0}, kernel)
    _launch(adds, restored=(state,))
    assert seen == [0.0] * 7
    assert state.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_an_unknown_value_of_the_switch_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEFORMER_AUTOTUNE", value)
    with pytest.raises(ValueError, match="SPARSEFORMER_AUTOTUNE"):
        _launch(Kernel())


def test_nothing_is_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFORMER_AUTOTUNE", "1")
    kernel = Kernel()
    _launch(kernel)
    assert kernel.launched == [BIG]


@pytest.mark.parametrize(
    ("switch", "is_capturing", "expected"),
    [("1", False, True), ("0", False, False), (None, False, False), ("1", True, False)],
    ids=["asked", "off", "unset", "in-a-cuda-graph"],
)
def test_a_gpu_is_timed_only_where_asked_and_outside_of_graphs(
    switch: str | None, is_capturing: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARSEFORMER_AUTOTUNE", raising=False)
    if switch is not None:
        monkeypatch.setenv("SPARSEFORMER_AUTOTUNE", switch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    assert tuning._may_time(torch.device("cuda", 0)) is expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), False),
        ((9, 0), True),
        ((10, 0), True),
        ((10, 3), True),
        ((12, 0), False),
        ((12, 1), False),
        ((13, 0), False),
    ],
    ids=str,
)
def test_warp_groups_by_architecture(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    multiplies_by_warp_groups.cache_clear()
    assert multiplies_by_warp_groups(torch.device("cuda", 0)) is expected
    multiplies_by_warp_groups.cache_clear()


def test_a_cpu_has_no_warp_groups() -> None:
    assert not multiplies_by_warp_groups(CPU)


def test_launches_shrink_to_one_stage() -> None:
    assert smaller_launches(Launch(8, 3)) == (Launch(8, 3), Launch(8, 2), Launch(8, 1))


@pytest.mark.parametrize(("warps", "other"), [(1, 2), (4, 8), (8, 4), (16, 8)])
def test_larger_launches_add_a_stage_or_change_the_warps(warps: int, other: int) -> None:
    assert larger_launches(Launch(warps, 2)) == (Launch(warps, 3), Launch(other, 2))


def test_plans_shrink_to_sixteen_keys() -> None:
    plans = smaller_plans(Plan(64, Launch(4, 2), rows=32))
    assert plans == (
        Plan(64, Launch(4, 2), rows=32),
        Plan(64, Launch(4, 1), rows=32),
        Plan(32, Launch(4, 1), rows=32),
        Plan(16, Launch(4, 1), rows=32),
    )


def test_larger_plans_stay_within_a_tile() -> None:
    assert Plan(64, Launch(4, 2)) in larger_plans(Plan(32, Launch(4, 2)), 64)
    assert all(plan.columns == 32 for plan in larger_plans(Plan(32, Launch(4, 2)), 32))


@pytest.mark.parametrize("eps", [None, 0.0, 0.5, 1.0])
def test_warp_groups_get_whole_tiles_of_keys(eps: float | None) -> None:
    plans = plans_for(torch.bfloat16, 64, 64, eps, False, True)
    assert plans.key == Plan(64, Launch(4, 2))
    assert plans_for(torch.bfloat16, 64, 64, eps, False).key.rows == 32


@pytest.mark.parametrize(
    ("dim", "eps", "has_extras"),
    [(128, None, False), (128, 0.5, False), (64, 0.5, True)],
    ids=["wide-learned", "wide", "extras"],
)
def test_other_cases_have_one_plan_for_every_gpu(
    dim: int, eps: float | None, has_extras: bool
) -> None:
    plans = [plans_for(torch.bfloat16, dim, dim, eps, has_extras, x) for x in (False, True)]
    assert plans[0] == plans[1]


def _case(
    q: Tensor | None = None, k: Tensor | None = None, alpha: float = 1.5, **options: object
) -> tuple[object, ...]:
    q = torch.zeros(1, 2, 40, 16) if q is None else q
    k = torch.zeros(1, 2, 40, 16) if k is None else k
    return launch_case(entmax_arguments(q, k, k, alpha, Options(**options)))


@pytest.mark.parametrize(
    "other",
    [
        _case(q=torch.zeros(1, 2, 70, 16)),
        _case(k=torch.zeros(1, 2, 90, 16)),
        _case(k=torch.zeros(1, 1, 40, 16)),
        _case(q=torch.zeros(1, 2, 40, 16).half(), k=torch.zeros(1, 2, 40, 16).half()),
        _case(q=torch.zeros(1, 2, 40, 32), k=torch.zeros(1, 2, 40, 32)),
        _case(alpha=2.0),
        _case(is_causal=True),
        _case(window=(4, 4)),
        _case(key_length=torch.tensor([30])),
        _case(relative_bias=torch.zeros(2, 79)),
        _case(dropout_p=0.1),
    ],
    ids=[
        "queries",
        "keys",
        "groups",
        "dtype",
        "dim",
        "alpha",
        "causal",
        "window",
        "padding",
        "bias",
        "dropout",
    ],
)
def test_cases_differ_where_the_cost_does(other: tuple[object, ...]) -> None:
    assert other != _case()


def test_lengths_of_one_power_of_two_share_a_case() -> None:
    assert _case(q=torch.zeros(1, 2, 60, 16)) == _case()
