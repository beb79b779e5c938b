"""Attention is a torch operator: opcheck passes, and torch.compile traces it without a break."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_case import Case
from torch import Tensor

from sparseformer.functional import (
    entmax_attention,
    entmax_attention_with_stats,
    topk_attention,
    topp_attention,
)
from sparseformer.kernels.entmax_attention.checks import (
    Options,
    entmax_arguments,
    topk_arguments,
)
from sparseformer.nn import MultiheadAttention

PADDED = Case(start=(0, 1), length=(3, 5), alpha=(1.2, 1.8), bias=True, is_causal=True)


def _leaves(case: Case) -> dict[str, Any]:
    tensors = case.tensors(torch.float32)
    return {
        name: value.requires_grad_() if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize("keep", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", [Case(), Case(alpha=1.0), PADDED], ids=["1.5", "1", "padded"])
def test_opcheck_passes_on_entmax(case: Case, keep: bool) -> None:
    tensors = _leaves(case) if keep else case.tensors(torch.float32)
    bias = tensors.pop("relative_bias", None)
    options = Options(relative_bias=bias, **case.masks())
    arguments = entmax_arguments(*tensors.values(), options)
    # As a leaf; the alpha of a call is an expanded view.
    arguments = arguments._replace(alpha=tensors["alpha"] if bias is not None else None)
    torch.library.opcheck(torch.ops.sparseformer.attention.default, (*arguments, keep, False))


def test_opcheck_passes_on_top_k_with_strided_16_bit_inputs_and_counts() -> None:
    qkv = torch.randn(2, 5, 3, 2, 4, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    arguments = topk_arguments(*(x.detach().requires_grad_() for x in qkv), 2, Options())
    torch.library.opcheck(torch.ops.sparseformer.attention.default, (*arguments, True, True))


Attend = Callable[..., Tensor]
MAPS: list[tuple[str, Attend]] = [
    ("entmax 1.3", lambda q, k, v, _, **o: entmax_attention(q, k, v, 1.3, **o)),
    ("learned", lambda q, k, v, a, **o: entmax_attention(q, k, v, a, **o)),
    ("softmax", lambda q, k, v, _, **o: entmax_attention(q, k, v, 1.0, **o)),
    ("top-k", lambda q, k, v, _, **o: topk_attention(q, k, v, 2, **o)),
    ("top-p", lambda q, k, v, _, **o: topp_attention(q, k, v, 0.7, **o)),
    ("stats", lambda q, k, v, a, **o: entmax_attention_with_stats(q, k, v, a, **o)[0]),
]


@pytest.mark.parametrize("attend", [m[1] for m in MAPS], ids=[m[0] for m in MAPS])
def test_the_compiled_graph_is_whole_and_equals_eager(attend: Attend) -> None:
    case = Case(heads=4, key_heads=2, alpha=(1.0, 1.2, 1.5, 2.0), length=(3, 5), window=(2, 1))
    results = []
    for compiled in (False, True):
        leaves = _leaves(case)
        function = (
            torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        )
        output = function(*leaves.values(), **case.masks())
        output.square().sum().backward()
        results.append([output, *(x.grad for x in leaves.values())])
    for eager, traced in zip(*results, strict=True):
        assert (eager is None) == (traced is None)
        if eager is not None:
            torch.testing.assert_close(traced, eager, atol=0, rtol=0)


@pytest.mark.parametrize("attn", ["softmax", "entmax15", "entmax_adaptive", "topk"])
def test_a_compiled_layer_equals_the_eager_one(attn: Any) -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, attn=attn, k=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 16)
    expected, actual = layer(x, is_causal=True), compiled(x, is_causal=True)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    grads = [torch.autograd.grad(y.sum(), list(layer.parameters())) for y in (expected, actual)]
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-5)


def test_dropout_draws_anew_at_each_call_of_a_compiled_graph() -> None:
    q = torch.randn(1, 1, 8, 4)

    def attend(x: Tensor) -> Tensor:
        return entmax_attention(x, x, x, 1.0, dropout_p=0.5)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = compiled(q), compiled(q)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(q), first, atol=0, rtol=0)


def test_a_compiled_graph_names_an_alpha_out_of_range() -> None:
    q = torch.randn(1, 2, 3, 4)
    compiled = torch.compile(entmax_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"alpha of head 1 is 2.5, but it must be in \[1, 2\]"):
        compiled(q, q, q, torch.tensor([1.5, 2.5]))
