"""The maps as torch.library operators: opcheck, torch.compile without graph breaks, and checks."""

import math
from collections.abc import Callable

import pytest
import torch
from entmax_case import scores
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseformer import functional
from sparseformer.nn.mappings import AdaptiveAlpha, Entmax, Sparsemax, TaylorSoftmax, TopkSoftmax
from sparseformer.testing import assert_close_to_reference

OPERATORS = torch.ops.sparseformer
HALF, BF16 = torch.float16, torch.bfloat16


def wanted(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def row_alphas(rows: int) -> Tensor:
    return torch.linspace(1.0, 2.0, rows)[:, None]


X = scores(4, 7, dtype=torch.float32)


@pytest.mark.parametrize(
    ("x", "alpha", "fixed"),
    [
        pytest.param(X, None, 1.5, id="no gradient"),
        pytest.param(wanted(X), None, 1.0, id="softmax"),
        pytest.param(wanted(X), None, 3.0, id="steep"),
        pytest.param(X, wanted(torch.tensor([1.3])), 1.0, id="alpha only"),
        pytest.param(wanted(X), wanted(row_alphas(4)), 1.0, id="alpha per row"),
        pytest.param(wanted(X.double()), wanted(row_alphas(4).double()), 1.0, id="float64"),
        pytest.param(wanted(X.to(HALF)), wanted(row_alphas(4)), 1.0, id="half"),
        pytest.param(wanted(X.to(BF16)), None, 2.0, id="bf16"),
        pytest.param(wanted(X.t()), wanted(row_alphas(7)), 1.0, id="transposed"),
        pytest.param(wanted(X[:, ::2].t()), None, 1.0, id="transposed softmax"),
        pytest.param(wanted(X[:0]), wanted(torch.tensor([1.3])), 1.0, id="no rows"),
        pytest.param(wanted(X[:, :0].t()), None, 1.5, id="no rows, transposed"),
        pytest.param(wanted(X[:, :0]), wanted(row_alphas(4)), 1.0, id="no columns"),
        pytest.param(wanted(X[0]), wanted(torch.tensor([1.7])), 1.0, id="one row"),
    ],
)
def test_entmax_passes_opcheck(x: Tensor, alpha: Tensor | None, fixed: float) -> None:
    inputs = (x, alpha, fixed, "entmax", "auto")
    torch.library.opcheck(OPERATORS.entmax.default, inputs)
    probs = OPERATORS.entmax(*inputs).detach()
    for want_alpha in {False, alpha is not None}:
        arguments = (probs, x.detach(), alpha, fixed, "entmax", "auto", True, want_alpha)
        with torch.no_grad():
            torch.library.opcheck(OPERATORS.entmax_backward.default, arguments)


@pytest.mark.parametrize("log", [False, True], ids=["p", "log p"])
@pytest.mark.parametrize("k", [3, 99, None], ids=["top k", "all", "top p"])
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(X, id="no gradient"),
        pytest.param(wanted(X.double()), id="float64"),
        pytest.param(wanted(X.to(BF16)), id="bf16"),
        pytest.param(wanted(X[:, ::2].t()), id="transposed"),
        pytest.param(wanted(X[:0]), id="no rows"),
        pytest.param(wanted(X[:, :0].t()), id="no rows, transposed"),
    ],
)
def test_kept_softmax_passes_opcheck(x: Tensor, k: int | None, log: bool) -> None:
    torch.library.opcheck(OPERATORS.kept_softmax.default, (x, k, 0.6, log, "topk_softmax"))


def test_operators_without_gradients_pass_opcheck() -> None:
    for x in (X, wanted(X), X[:, ::2].t(), X[:0], X[:, :0]):
        torch.library.opcheck(OPERATORS.taylor_sizes.default, (x, "taylor_softmax"))
    for rows in (row_alphas(4), wanted(row_alphas(4).expand(4, 3)), X[:0]):
        arguments = (rows, "entmax", "temperature")
        torch.library.opcheck(OPERATORS.zeros_if_positive.default, arguments)
    for logits in (X[0], wanted(X[0] * 20), X[:0, 0]):
        torch.library.opcheck(OPERATORS.clamp_logits.default, (logits,))


class Chain(nn.Module):
    """Every map in a row, with a learned alpha and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 8)
        self.alpha = AdaptiveAlpha(3, [1.2, 1.5, 1.8])
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.sparsemax, self.topk = Sparsemax(dim=1), TopkSoftmax(3, temperature=0.5)
        self.entmax, self.taylor = Entmax(1.25, dim=0), TaylorSoftmax(4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[:, None] * torch.tensor([1.0, 2.0, -1.0])[:, None]
        alpha = self.alpha()[:, None]
        p = functional.entmax(heads, alpha, temperature=self.temperature)
        p = self.sparsemax(p + heads) + functional.entmax15(p) + self.entmax(heads)
        p = self.topk(p) + functional.topp_softmax(p, 0.8) + self.taylor(p)
        logs = (
            functional.log_topk_softmax(heads, 8)
            + functional.log_topp_softmax(heads, 1.0)
            + functional.log_taylor_softmax(heads)
            + functional.log_entmax(heads, 1.01)
        )
        return p + logs


def results(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, the gradients of the parameters and that of x."""
    torch.manual_seed(0)
    at = wanted(x)
    output = call(at)
    upstream = scores(*output.shape, seed=9, dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad(output, (*model.parameters(), at), upstream)]


def compiled_chain(backend: str) -> tuple[Chain, Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Chain()
    return model, torch.compile(model, fullgraph=True, backend=backend)


def test_a_compiled_chain_of_maps_equals_eager() -> None:
    model, compiled = compiled_chain("aot_eager")
    x = scores(6, 5, dtype=torch.float32)
    for actual, expected in zip(results(compiled, model, x), results(model, model, x), strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(actual, expected)


@pytest.mark.slow
# torch 2.13's own import of inductor.
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_chain_compiled_to_machine_code_equals_eager() -> None:
    model, compiled = compiled_chain("inductor")
    x = scores(6, 5, dtype=torch.float32)
    for actual, expected in zip(results(compiled, model, x), results(model, model, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_second_shape_compiles_once_more_and_a_third_not_at_all() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Chain()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    for batch in (4, 6, 9, 13):
        x = scores(batch, 5, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 2


def test_dynamic_shapes_have_gradients() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(5, 8), Entmax(1.3), TopkSoftmax(3))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (6, 3):
        x = scores(batch, 5, dtype=torch.float32)
        pairs = zip(results(compiled, model, x), results(model, model, x), strict=True)
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected)


def test_a_changing_float_alpha_or_k_needs_no_graph_break() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, alpha: float, k: int) -> Tensor:
        return functional.entmax(x, alpha) + functional.topk_softmax(x, k)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for alpha, k in ((1.5, 2), (1.3, 3), (2.0, 5)):
        torch.testing.assert_close(compiled(X, alpha, k), call(X, alpha, k))


MAPS = [
    pytest.param(lambda x, **o: functional.entmax(x, 1.3, **o), "entmax", id="entmax"),
    pytest.param(lambda x, **o: functional.log_entmax(x, 1.3, **o), "log_entmax", id="log_entmax"),
    pytest.param(functional.sparsemax, "sparsemax", id="sparsemax"),
    pytest.param(functional.entmax15, "entmax15", id="entmax15"),
    pytest.param(lambda x, **o: functional.topk_softmax(x, 3, **o), "topk_softmax", id="topk"),
    pytest.param(
        lambda x, **o: functional.log_topk_softmax(x, 3, **o), "log_topk_softmax", id="log_topk"
    ),
    pytest.param(lambda x, **o: functional.topp_softmax(x, 0.7, **o), "topp_softmax", id="topp"),
    pytest.param(
        lambda x, **o: functional.log_topp_softmax(x, 0.7, **o), "log_topp_softmax", id="log_topp"
    ),
    pytest.param(functional.taylor_softmax, "taylor_softmax", id="taylor"),
    pytest.param(functional.log_taylor_softmax, "log_taylor_softmax", id="log_taylor"),
]
Map = Callable[..., Tensor]


@pytest.mark.parametrize(("function", "name"), MAPS)
def test_compiled_maps_refuse_what_eager_refuses(function: Map, name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), function(X))
    for bad in (math.nan, math.inf):
        x = X.clone()
        x[1, 2] = bad
        for call in (function, compiled):
            with pytest.raises(ValueError, match=f"^{name} got {bad} in its scores"):
                call(x)
    with_temperature = torch.compile(
        lambda x, t: function(x, temperature=t), fullgraph=True, backend="aot_eager"
    )
    temperature = torch.full((4, 1), 0.7)
    torch.testing.assert_close(
        with_temperature(X, temperature), function(X, temperature=temperature)
    )
    temperature[2] = -1.0
    for call in (with_temperature, lambda x, t: function(x, temperature=t)):
        with pytest.raises(ValueError, match=f"^{name} needs a finite temperature above 0, got -1"):
            call(X, temperature)


def test_a_compiled_entmax_refuses_an_alpha_below_one() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(functional.entmax, fullgraph=True, backend="aot_eager")
    compiled(X, row_alphas(4))
    with pytest.raises(ValueError, match=r"^entmax needs a finite alpha of 1 or more, got 0.5"):
        compiled(X, row_alphas(4) - 0.5)


@pytest.mark.parametrize(("function", "name"), MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, BF16], ids=str)
def test_fake_and_meta_tensors_keep_shape_dtype_and_strides(
    function: Map, name: str, dtype: torch.dtype
) -> None:
    x = X.to(dtype)
    for dim in (0, 1):
        expected = function(x, dim=dim)
        assert expected.is_contiguous()
        assert function(x.to("meta"), dim=dim).stride() == expected.stride(), name
        with FakeTensorMode() as mode:
            fake = function(mode.from_tensor(x), dim=dim)
        assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, expected.stride(), dtype)


@pytest.mark.parametrize(("function", "name"), MAPS)
def test_upstream_gradients_may_have_any_stride(function: Map, name: str) -> None:
    x = wanted(X.double())
    upstream = scores(7, 8, seed=3)[:, ::2].t()
    expanded = scores(1, 7, seed=4).expand(4, 7)
    for grad in (upstream, expanded):
        actual = torch.autograd.grad(function(x), x, grad)[0]
        expected = torch.autograd.grad(function(x), x, grad.contiguous())[0]
        torch.testing.assert_close(actual, expected, atol=1e-14, rtol=0, msg=name)
        assert expected.abs().max() > 1e-3


@pytest.mark.parametrize(("function", "name"), [*MAPS[:3], *MAPS[4:8]])
def test_second_derivatives_are_refused_by_name(function: Map, name: str) -> None:
    x = wanted(X)
    with pytest.raises(RuntimeError, match="have no second derivative"):
        torch.autograd.grad(function(x)[0, 0], x, create_graph=True)
    assert name


def test_the_gradient_operator_has_no_gradient_itself() -> None:
    probs = wanted(functional.entmax(X))
    d_x, _ = OPERATORS.entmax_backward(probs, X, None, 1.5, "entmax", "auto", True, False)
    with pytest.raises(RuntimeError, match=r"entmax.* have no second derivative"):
        d_x.sum().backward()


def test_an_unknown_backend_is_refused_first() -> None:
    bad = torch.full((2, 2), math.nan)
    for function in (functional.entmax, functional.log_entmax, functional.sparsemax):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: backend is 'cuda', but"):
            function(bad, backend="cuda")


def test_backends_of_another_device_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^sparsemax: backend 'cpp' can't serve this call"):
        functional.sparsemax(X.double(), backend="cpp")


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, "per row"], ids=str)
def test_the_pytorch_backend_and_the_automatic_one_agree(alpha: float | str) -> None:
    value = row_alphas(4) if alpha == "per row" else alpha
    outcomes = []
    for backend in ("auto", "pytorch"):
        x = wanted(X)
        p = functional.entmax(x, value, backend=backend)  # type: ignore[arg-type]
        (d_x,) = torch.autograd.grad(p, x, scores(4, 7, seed=2, dtype=torch.float32))
        outcomes.append((p.detach(), d_x))
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 1.9], ids=str)
def test_gradients_from_probabilities_in_low_precision_keep_the_tolerance(
    alpha: float, dtype: torch.dtype
) -> None:
    """p is saved in the dtype of x, so the gradients start from its rounding."""
    x, upstream = scores(64, 33, dtype=dtype), scores(64, 33, seed=1, dtype=dtype)

    def run(precision: torch.dtype) -> tuple[Tensor, ...]:
        learned = torch.full((64, 1), alpha, dtype=torch.float32)
        learned = wanted(learned.double() if precision == torch.float64 else learned)
        at = wanted(x.to(precision))
        p = functional.entmax(at, learned)
        return torch.autograd.grad(p, (at, learned), upstream.to(precision))

    (d_x, d_alpha), (expected_x, expected_alpha) = run(dtype), run(torch.float64)
    assert (d_x.dtype, d_alpha.dtype) == (dtype, torch.float32)
    assert_close_to_reference(d_x, expected_x, kind="gradient")
    assert_close_to_reference(d_alpha.to(dtype), expected_alpha, kind="alpha")
