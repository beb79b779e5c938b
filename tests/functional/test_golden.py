"""entmax and its loss give the 40 golden vectors, values and gradients, on every CPU backend.

tests/golden/make_golden.py says where the vectors come from; their scores are exact in any dtype.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseformer.functional import entmax, entmax_loss
from sparseformer.kernels.common.native import why_no_compiler
from sparseformer.testing import assert_close_to_reference

VECTORS = json.loads((Path(__file__).parents[1] / "golden/entmax.json").read_text())["vectors"]
LANES = {
    "pytorch_float64": ("pytorch", torch.float64),
    "pytorch_float32": ("pytorch", torch.float32),
    **({} if why_no_compiler() else {"cpp_float32": ("cpp", torch.float32)}),
}
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])


def row(values: list[float | None] | float) -> Tensor:
    """Return float64, null as -inf."""
    if isinstance(values, float):
        return torch.tensor([values], dtype=torch.float64)
    return torch.tensor([-math.inf if v is None else v for v in values], dtype=torch.float64)


def leaf(values: list[float | None] | float, dtype: torch.dtype) -> Tensor:
    return row(values).to(dtype).requires_grad_()


@pytest.mark.parametrize("lane", LANES)
@each_vector
def test_entmax_and_its_gradients(vector: dict[str, Any], lane: str) -> None:
    backend, dtype = LANES[lane]
    scores, alpha = leaf(vector["scores"], dtype), leaf(vector["alpha"], dtype)
    probs = entmax(scores, alpha, backend=backend)
    (probs * row(vector["weights"]).to(dtype)).sum().backward()
    assert scores.grad is not None
    assert alpha.grad is not None
    assert_close_to_reference(probs, row(vector["probs"]))
    # Together, because equal scores have slope 0 in alpha, which leaves no scale for rounding.
    slopes, expected = [scores.grad, alpha.grad], [row(vector["d_scores"]), row(vector["d_alpha"])]
    assert_close_to_reference(torch.cat(slopes), torch.cat(expected), kind="gradient")


@pytest.mark.parametrize("lane", LANES)
@each_vector
def test_zeros_are_exact(vector: dict[str, Any], lane: str) -> None:
    backend, dtype = LANES[lane]
    probs = entmax(row(vector["scores"]).to(dtype), vector["alpha"], backend=backend)
    assert (probs == 0).tolist() == [p == 0.0 for p in vector["probs"]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@each_vector
def test_entmax_loss_and_its_gradients(vector: dict[str, Any], dtype: torch.dtype) -> None:
    logits, alpha = leaf(vector["scores"], dtype), leaf(vector["alpha"], dtype)
    loss = entmax_loss(logits[None], torch.tensor([vector["target"]]), alpha, reduction="none")
    loss.sum().backward()
    assert logits.grad is not None
    assert alpha.grad is not None
    assert_close_to_reference(loss, row(vector["loss"]))
    assert_close_to_reference(logits.grad, row(vector["d_logits"]), kind="gradient")
    assert_close_to_reference(alpha.grad, row(vector["d_loss_d_alpha"]), kind="alpha")
