"""The Triton kernels of entmax give the 40 golden vectors, values and gradients.

tests/golden/make_golden.py says where the vectors come from; their scores are exact in any dtype.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseformer.kernels.entmax.rows import entmax_gradients, entmax_rows
from sparseformer.testing import assert_close_to_reference

# The interpreter computes in numpy, which warns of a 0 * inf that the kernel's masks discard.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VECTORS = json.loads((Path(__file__).parents[1] / "golden/entmax.json").read_text())["vectors"]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}
LENGTHS = sorted({len(vector["scores"]) for vector in VECTORS})


def rows(vectors: list[dict[str, Any]], key: str) -> Tensor:
    """Return [vectors, length] float64, null as -inf, or [vectors, 1] of numbers."""
    found = [vector[key] if isinstance(vector[key], list) else [vector[key]] for vector in vectors]
    values = [[-math.inf if v is None else v for v in row] for row in found]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_one_length_each_with_its_alpha(length: int, dtype: str) -> None:
    vectors = [vector for vector in VECTORS if len(vector["scores"]) == length]
    scores, weights = (rows(vectors, key).to(DTYPES[dtype]) for key in ("scores", "weights"))
    alphas = rows(vectors, "alpha").to(torch.float64 if dtype == "float64" else torch.float32)
    probs = entmax_rows(scores, alphas, "triton")
    d_scores, d_alpha = entmax_gradients(probs, weights, alphas, True, True, "triton")
    assert d_scores is not None
    assert d_alpha is not None
    assert_close_to_reference(probs, rows(vectors, "probs"))
    assert_close_to_reference(d_scores, rows(vectors, "d_scores"), kind="gradient")
    slopes = d_alpha.to(DTYPES[dtype])
    assert_close_to_reference(slopes, rows(vectors, "d_alpha"), kind="alpha")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_fast_paths_of_one_alpha(alpha: float, dtype: str) -> None:
    for length in LENGTHS:
        vectors = [v for v in VECTORS if v["alpha"] == alpha and len(v["scores"]) == length]
        if not vectors:
            continue
        scores, weights = (rows(vectors, key).to(DTYPES[dtype]) for key in ("scores", "weights"))
        probs = entmax_rows(scores, alpha, "triton")
        d_scores, d_alpha = entmax_gradients(probs, weights, alpha, True, False, "triton")
        assert d_alpha is None
        assert d_scores is not None
        assert (probs == 0).tolist() == (rows(vectors, "probs") == 0).tolist()
        assert_close_to_reference(probs, rows(vectors, "probs"))
        assert_close_to_reference(d_scores, rows(vectors, "d_scores"), kind="gradient")
