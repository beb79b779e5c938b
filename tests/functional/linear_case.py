"""What the tests of the losses on hidden states share: the losses, a batch, and small tiles."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparseformer.functional import (
    entmax_loss,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
)
from sparseformer.kernels.sparse_loss import linear

F64 = torch.float64
ROWS, WIDTH, CLASSES = 6, 5, 41
PER_ROW = torch.linspace(1.0, 2.0, ROWS, dtype=F64)

# name: (loss on hidden states, loss on logits, their arguments)
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict]] = {
    "full": (linear_cross_entropy, F.cross_entropy, {}),
    "top-1": (linear_sparse_cross_entropy, sparse_cross_entropy, {"k": 1}),
    "top-4": (linear_sparse_cross_entropy, sparse_cross_entropy, {"k": 4}),
    "top-30": (linear_sparse_cross_entropy, sparse_cross_entropy, {"k": 30}),
    "top-p": (linear_sparse_cross_entropy, sparse_cross_entropy, {"top_p": 0.6}),
    "entmax-1.05": (linear_entmax_loss, entmax_loss, {"alpha": 1.05}),
    "entmax-1.5": (linear_entmax_loss, entmax_loss, {"alpha": 1.5}),
    "sparsemax": (linear_entmax_loss, entmax_loss, {"alpha": 2.0}),
    "per-row-alpha": (linear_entmax_loss, entmax_loss, {"alpha": PER_ROW}),
}
each_loss = pytest.mark.parametrize("name", list(LOSSES))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float32, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Hidden states, an output projection and targets, in float64."""

    def __init__(self, scale: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=F64)

        self.hidden = (scale * draw(ROWS, WIDTH)).requires_grad_()
        self.weight = draw(CLASSES, WIDTH).requires_grad_()
        self.bias = draw(CLASSES).requires_grad_()
        self.target = torch.tensor([0, CLASSES - 1, 7, 8, -100, 20])
        self.upstream = draw(ROWS)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, self.weight, self.bias

    def logits(self, softcap: float | None = None) -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def linear(self, name: str, **kwargs: object) -> Tensor:
        function, _, arguments = LOSSES[name]
        operands = (self.hidden, self.weight, self.target)
        return function(*operands, linear_bias=self.bias, **arguments, **kwargs)

    def expected(self, name: str, softcap: float | None = None, **kwargs: object) -> Tensor:
        _, function, arguments = LOSSES[name]
        return function(self.logits(softcap), self.target, **arguments, **kwargs)

    def check(self, loss: Tensor, expected: Tensor) -> None:
        upstream = self.upstream if loss.ndim else None
        torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
        grads = torch.autograd.grad(loss, self.leaves, upstream)
        wanted = torch.autograd.grad(expected, self.leaves, upstream)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-11)


def cut(monkeypatch: pytest.MonkeyPatch, classes: int, tokens: int = 100) -> None:
    """Make tiles of this many tokens by classes, and never all logits at once."""
    monkeypatch.setattr(linear, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(linear, "TILE_TOKENS", tokens)
    monkeypatch.setattr(linear, "TILE_LOGITS", tokens * classes)
