"""The gradient of softmax on a kept set; only the probabilities are saved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class KeptSoftmaxFunction(torch.autograd.Function):
    """p = mapping(scores), a softmax over a set of kept scores that counts as constant."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mapping: Callable[[Tensor], Tensor]) -> Tensor:
        probs = mapping(scores)
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "topk_softmax and topp_softmax have no second derivative: call backward or "
                "torch.autograd.grad without create_graph=True."
            )
        (probs,) = ctx.saved_tensors
        mean = (probs * grad).sum(-1, keepdim=True)
        return probs * (grad - mean), None
