"""The kernels of both passes together: gradients from what the forward kernels really leave."""

import pytest
import torch
from attention_backward_case import BackwardCase, reference_gradients, wanted_of

from sparseformer.kernels.entmax_attention.backward import attention_backward
from sparseformer.kernels.entmax_attention.forward import attention_forward
from sparseformer.testing import assert_close_to_reference

LEARNED = (1.2, 1.6)
CASES = {
    "causal-bias": BackwardCase(queries=35, keys=40, is_causal=True, alpha=LEARNED, bias=True),
    "padding": BackwardCase(
        batch=2, queries=9, keys=150, start=(0, 20), length=(150, 149), alpha=LEARNED
    ),
    "packed-dropout": BackwardCase(
        queries=30,
        keys=53,
        packed_q=(0, 3, 21, 30),
        packed_k=(0, 20, 41, 53),
        alpha=LEARNED,
        dropout_p=0.3,
    ),
    "softmax": BackwardCase(heads=1, key_heads=1, queries=9, keys=40, alpha=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_passes_give_the_gradients_of_the_definition(
    case: BackwardCase, dtype: torch.dtype
) -> None:
    arguments, grad_output = case.arguments(dtype), case.grad_output(dtype)
    _, saved = attention_forward(arguments, True)
    grads = attention_backward(arguments, saved, grad_output, wanted_of(arguments))
    references = reference_gradients(case, arguments, grad_output)
    given = [grad for grad in grads if grad is not None]
    for grad, reference in zip(given, references, strict=True):
        baseline = None if grad.dtype == torch.float32 else reference.to(dtype)
        kind = "alpha" if grad is grads.alpha else "gradient"
        assert_close_to_reference(grad, reference, baseline, kind=kind)
