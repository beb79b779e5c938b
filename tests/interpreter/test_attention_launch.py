"""Attention gives the same results with every launch that a card or a timing may choose."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_backward_case import BackwardCase, reference_gradients
from triton.runtime.errors import OutOfResources

from sparseformer.kernels.common import tuning
from sparseformer.kernels.common.launch import Launch
from sparseformer.kernels.entmax_attention import (
    backward,
    backward_bias,
    backward_key,
    backward_query,
    forward_decode,
    forward_one_tile,
    forward_output,
    forward_sketch,
    forward_softmax,
)
from sparseformer.kernels.entmax_attention.backward_plans import Plan, Plans
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward import attention_forward
from sparseformer.testing import assert_close_to_reference

TILE = Blocks(64, 64)
BIASED = BackwardCase(
    heads=1, key_heads=1, queries=70, keys=100, is_causal=True, bias=True, blocks=TILE
)
FORWARDS = {
    "two-passes": (BackwardCase(heads=1, key_heads=1, queries=20, keys=100), True),
    "inference": (BackwardCase(heads=1, key_heads=1, queries=20, keys=100), False),
    "one-tile": (BackwardCase(heads=1, key_heads=1, queries=20, keys=30), True),
    "softmax": (BackwardCase(heads=1, key_heads=1, queries=20, keys=150, alpha=1.0), True),
    "decode": (BackwardCase(heads=1, key_heads=1, queries=1, keys=100), False),
}
KERNELS = {
    "two-passes": (forward_sketch, "_entmax_attention_sketch_kernel"),
    "inference": (forward_output, "_entmax_attention_output_kernel"),
    "one-tile": (forward_one_tile, "_entmax_attention_one_tile_kernel"),
    "softmax": (forward_softmax, "_softmax_attention_forward_kernel"),
    "decode": (forward_decode, "_entmax_attention_decode_output_kernel"),
}


class Refusing:
    """A kernel on a card that has no room for some of its launches."""

    def __init__(self, kernel: Any, is_too_large: Callable[[dict[str, Any]], bool]) -> None:
        self.kernel, self.is_too_large, self.refused = kernel, is_too_large, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            if self.is_too_large(arguments):
                self.refused += 1
                raise OutOfResources(200_000, 101_376, "shared memory")
            self.kernel[grid](**arguments)

        return launch


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_chosen", {})
    tuning._say_once.cache_clear()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(64, Launch(4)),
        Plan(64, Launch(4), rows=32),
        Plan(32, Launch(8, 1)),
        Plan(16, Launch(4), rows=16),
    ],
    ids=["whole-tile", "half-the-queries", "half-the-keys", "quarters"],
)
def test_gradients_do_not_depend_on_the_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    bias_plan = plan._replace(rows=None)
    plans = Plans(query=plan._replace(rows=None), key=plan, bias=bias_plan)
    monkeypatch.setattr(backward, "plans_for", lambda *_: plans)
    _assert_gradients(BIASED)


@pytest.mark.parametrize("name", ["query", "key", "bias"])
def test_a_backward_kernel_takes_fewer_keys_where_more_do_not_fit(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = {"query": backward_query, "key": backward_key, "bias": backward_bias}[name]
    attribute = f"_entmax_attention_backward_{name}_kernel"
    kernel = Refusing(getattr(module, attribute), lambda launch: launch["BLOCK_N"] > 16)
    plan = Plan(64, Launch(4, 2))
    monkeypatch.setattr(backward, "plans_for", lambda *_: Plans(plan, plan, plan))
    monkeypatch.setattr(module, attribute, kernel)
    with caplog.at_level(logging.WARNING, logger="sparseformer"):
        _assert_gradients(BIASED)
    # 64 keys with two stages and one, then 32.
    assert kernel.refused == 3
    assert f"attention backward {name} runs with Plan(columns=16" in caplog.messages[-1]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_kernel_takes_fewer_stages_where_more_do_not_fit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, keep = FORWARDS[name]
    expected = attention_forward(case.arguments(), keep)
    module, attribute = KERNELS[name]
    kernel = Refusing(getattr(module, attribute), lambda launch: launch["num_stages"] > 1)
    monkeypatch.setattr(module, attribute, kernel)
    _assert_same(attention_forward(case.arguments(), keep), expected)
    assert kernel.refused == 1


@pytest.mark.parametrize("name", FORWARDS)
def test_timing_a_forward_pass_changes_no_bit_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, keep = FORWARDS[name]
    expected = attention_forward(case.arguments(), keep)
    timed = _time_everything(monkeypatch)
    _assert_same(attention_forward(case.arguments(), keep), expected)
    # The usual launch, fewer stages, more stages, other warps; two kernels for two passes.
    assert len(timed) == (8 if name in ("two-passes", "inference") else 4)


def test_timing_a_backward_pass_keeps_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = _time_everything(monkeypatch)
    _assert_gradients(
        BackwardCase(heads=1, key_heads=1, queries=9, keys=20, bias=True, alpha=(1.4,))
    )
    assert timed


def test_nothing_is_timed_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFORMER_AUTOTUNE", "1")
    monkeypatch.setattr(tuning, "_time", lambda _: pytest.fail("a launch was timed"))
    assert not tuning._may_time(torch.device("cuda", 0))
    case, keep = FORWARDS["one-tile"]
    attention_forward(case.arguments(), keep)


def _time_everything(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time each launch twice, each taking less than the ones before, so that the last one wins."""
    timed: list[float] = []

    def time(launch: Callable[[], None]) -> float:
        launch()
        launch()
        timed.append(-float(len(timed)))
        return timed[-1]

    monkeypatch.setattr(tuning, "_may_time", lambda _: True)
    monkeypatch.setattr(tuning, "_time", time)
    return timed


def _assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)


def _assert_gradients(case: BackwardCase) -> None:
    arguments, grad_output = case.arguments(), case.grad_output()
    grads = [x for x in case.run(arguments, grad_output) if x is not None]
    for grad, reference in zip(
        grads, reference_gradients(case, arguments, grad_output), strict=True
    ):
        assert_close_to_reference(grad, reference, kind="gradient")
