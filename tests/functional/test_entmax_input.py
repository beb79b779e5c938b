"""What entmax accepts and refuses: shapes, dtypes, dims, strides, values."""

import math

import pytest
import torch
from entmax_case import bisect, scores
from torch import Tensor

from sparseformer.functional import entmax, entmax15, sparsemax
from sparseformer.testing import assert_close_to_reference


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("function", [entmax, sparsemax, entmax15], ids=lambda f: f.__name__)
def test_nan_and_inf_are_refused_by_name(function, bad: float) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(3, 4)
    x[1, 2] = bad
    with pytest.raises(ValueError, match=rf"^{function.__name__} got {bad} in its scores"):
        function(x)


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        pytest.param(0.9, "alpha of 1 or more, got 0.9", id="below"),
        pytest.param(math.nan, "got nan", id="nan"),
        pytest.param(math.inf, "got inf", id="inf"),
        pytest.param(torch.tensor(0.5), "alpha of 1 or more, got 0.5", id="tensor below"),
        pytest.param(torch.tensor([1.5, math.nan])[:, None], "got nan", id="tensor nan"),
        pytest.param(torch.full((1, 3), 1.5), "size 1 along dim -1", id="along dim"),
        pytest.param(torch.full((5, 1), 1.5), r"got shape \(5, 1\)", id="wrong rows"),
        pytest.param(torch.full((1, 2, 1), 1.5), r"got shape \(1, 2, 1\)", id="wrong rank"),
    ],
)
def test_a_bad_alpha_is_refused(alpha: float | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entmax(torch.zeros(2, 3), alpha)


def test_integer_scores_and_bad_temperatures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"floating point scores, got torch\.int64"):
        entmax(torch.zeros(3, dtype=torch.long))
    for temperature in (0.0, -1.0, math.nan, torch.tensor(0.0)):
        with pytest.raises(ValueError, match="temperature above 0"):
            entmax(torch.zeros(3), temperature=temperature)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_dim_and_stride_equals_the_last_dim(dim: int) -> None:
    x = scores(8, 10, 12)[::2, :, 1:].transpose(0, 1)
    alpha = 1 + scores(*x.movedim(dim, -1)[..., :1].shape, seed=3).sigmoid()
    upstream = scores(*x.shape, seed=4)
    results = []
    for moved in (True, False):
        at, learned = x.clone().requires_grad_(), alpha.clone().requires_grad_()
        if moved:
            p = entmax(at.movedim(dim, -1).contiguous(), learned).movedim(-1, dim)
        else:
            p = entmax(at, learned.movedim(-1, dim), dim)
        results.append((p.detach(), *torch.autograd.grad(p, (at, learned), upstream)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_are_kept_and_low_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x = scores(6, 30, dtype=dtype).requires_grad_()
    alpha = torch.tensor(1.4, requires_grad=True)
    p = entmax(x, alpha)
    upstream = scores(6, 30, seed=1, dtype=dtype)
    d_x, d_alpha = torch.autograd.grad(p, (x, alpha), upstream)
    assert (p.dtype, d_x.dtype, d_alpha.dtype) == (dtype, dtype, torch.float32)
    # alpha is fp32 in both.
    assert_close_to_reference(p, bisect(x.detach(), float(torch.tensor(1.4))))


def test_fp16_works_at_its_largest_value() -> None:
    x = torch.tensor([[65504.0, 65504.0, -65504.0]], dtype=torch.float16)
    assert entmax(x, 1.3).tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    for alpha in (1.0, 1.4, 2.0, torch.tensor(1.5)):
        x = torch.zeros(shape, requires_grad=True)
        p = entmax(x, alpha)
        assert p.shape == shape
        p.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape


def test_a_scalar_maps_to_one() -> None:
    assert entmax(torch.tensor(3.0), 1.3).item() == 1.0
    assert sparsemax(torch.tensor(-3.0)).shape == ()


def test_temperature_divides_the_scores_and_is_differentiable() -> None:
    x = scores(3, 5)
    x[0, 1] = -math.inf
    torch.testing.assert_close(entmax(x, 1.4, temperature=2.5), entmax(x / 2.5, 1.4))
    temperature = torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: entmax(x, 1.4, temperature=t), (temperature,))
