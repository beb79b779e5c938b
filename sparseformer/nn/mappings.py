"""Modules that map scores to probabilities, and the learned alpha of attention heads."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparseformer.config import BackendName
from sparseformer.functional import (
    entmax,
    entmax15,
    sparsemax,
    taylor_softmax,
    topk_softmax,
    topp_softmax,
)

# Beyond this logit sigmoid is within 6.2e-6 of its end, and its gradient no longer moves a head.
_LOGIT_LIMIT = 12.0
_NARROWEST_RANGE = 0.05


class Entmax(nn.Module):
    """Module form of `sparseformer.functional.entmax`; learn alpha with `AdaptiveAlpha`."""

    def __init__(
        self,
        alpha: float = 1.5,
        dim: int = -1,
        *,
        temperature: float = 1.0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        self.alpha, self.dim = alpha, dim
        self.temperature, self.backend = temperature, backend

    def forward(self, x: Tensor) -> Tensor:
        return entmax(x, self.alpha, self.dim, temperature=self.temperature, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"alpha={self.alpha}, dim={self.dim}, temperature={self.temperature}, "
            f"backend={self.backend!r}"
        )


class Sparsemax(nn.Module):
    """Module form of `sparseformer.functional.sparsemax`."""

    def __init__(
        self, dim: int = -1, *, temperature: float = 1.0, backend: BackendName = "auto"
    ) -> None:
        super().__init__()
        self.dim, self.temperature, self.backend = dim, temperature, backend

    def forward(self, x: Tensor) -> Tensor:
        return sparsemax(x, self.dim, temperature=self.temperature, backend=self.backend)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, temperature={self.temperature}, backend={self.backend!r}"


class Entmax15(Sparsemax):
    """Module form of `sparseformer.functional.entmax15`."""

    def forward(self, x: Tensor) -> Tensor:
        return entmax15(x, self.dim, temperature=self.temperature, backend=self.backend)


class TopkSoftmax(nn.Module):
    """Module form of `sparseformer.functional.topk_softmax`."""

    def __init__(self, k: int, dim: int = -1, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.k, self.dim, self.temperature = k, dim, temperature

    def forward(self, x: Tensor) -> Tensor:
        return topk_softmax(x, self.k, self.dim, temperature=self.temperature)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}, temperature={self.temperature}"


class ToppSoftmax(nn.Module):
    """Module form of `sparseformer.functional.topp_softmax`."""

    def __init__(self, p: float, dim: int = -1, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.p, self.dim, self.temperature = p, dim, temperature

    def forward(self, x: Tensor) -> Tensor:
        return topp_softmax(x, self.p, self.dim, temperature=self.temperature)

    def extra_repr(self) -> str:
        return f"p={self.p}, dim={self.dim}, temperature={self.temperature}"


class TaylorSoftmax(nn.Module):
    """Module form of `sparseformer.functional.taylor_softmax`."""

    def __init__(self, order: int = 2, dim: int = -1, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.order, self.dim, self.temperature = order, dim, temperature

    def forward(self, x: Tensor) -> Tensor:
        return taylor_softmax(x, self.order, self.dim, temperature=self.temperature)

    def extra_repr(self) -> str:
        return f"order={self.order}, dim={self.dim}, temperature={self.temperature}"


class AdaptiveAlpha(nn.Module):
    """Learn one alpha per head: alpha = low + (high - low) * sigmoid(z), z a parameter.

    The parametrisation keeps alpha inside [low, high], whatever the optimiser does. A sigmoid that
    has run far out has no gradient left to come back, so z counts as at most 12 away from 0, and
    out there it receives only gradients that lead back: alpha stays 6e-6 of the range clear of
    either end, and a head that is pushed against an end can leave it again.

    The logits stay fp32 also when the model is cast to a lower precision. They want no weight
    decay, which would pull alpha to the middle of the range.

    Args:
        num_heads: How many alphas.
        init: Where each head starts, strictly inside (low, high): one float, or one per head.
        low: Lower end, 1 (softmax) or more.
        high: Upper end; 2 is sparsemax.

    Raises:
        ValueError: the range can't be used, or an init lies outside it or at an end.

    Source:
        Correia, Niculae and Martins 2019, "Adaptively Sparse Transformers".
    """

    def __init__(
        self,
        num_heads: int,
        init: float | Sequence[float] = 1.5,
        low: float = 1.0,
        high: float = 2.0,
    ) -> None:
        super().__init__()
        if not (1.0 <= low < math.inf and low + _NARROWEST_RANGE <= high < math.inf):
            raise ValueError(
                f"AdaptiveAlpha needs 1 <= low and low + {_NARROWEST_RANGE} <= high, "
                f"got low={low} and high={high}."
            )
        starts = [float(init)] * num_heads if isinstance(init, (int, float)) else list(init)
        if num_heads < 1 or len(starts) != num_heads:
            raise ValueError(
                f"AdaptiveAlpha needs 1 head or more and an init for each: "
                f"num_heads is {num_heads}, init has {len(starts)} values."
            )
        self.num_heads, self.low, self.high = num_heads, low, high
        logits = [self._logit(head, start) for head, start in enumerate(starts)]
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    @classmethod
    def from_alphas(cls, alphas: Sequence[float], low: float = 1.0, high: float = 2.0) -> Self:
        """Return a module whose heads start at the given alphas, such as those of a trained run."""
        return cls(len(alphas), alphas, low, high)

    def forward(self) -> Tensor:
        """Return alpha, fp32 [num_heads]."""
        share = torch.sigmoid(_clamp_logits(self.logits))
        return self.low + (self.high - self.low) * share

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, low={self.low}, high={self.high}"

    def _logit(self, head: int, alpha: float) -> float:
        share = (alpha - self.low) / (self.high - self.low)
        smallest = 1 / (1 + math.exp(_LOGIT_LIMIT))
        if not smallest <= share <= 1 - smallest:
            raise ValueError(
                f"AdaptiveAlpha can't start head {head} at {alpha}: start strictly inside "
                f"({self.low}, {self.high}), such as 0.01 from an end, or use a fixed alpha."
            )
        return math.log(share / (1 - share))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(logits: Tensor) -> Tensor:
            moved = fn(logits)
            return moved if moved.dtype == logits.dtype else logits.to(moved.device)

        super()._apply(keep_precision, recurse)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        logits = state_dict.get(f"{prefix}logits")
        if logits is not None and not bool(logits.isfinite().all()):
            bad = [f"head {i}: {z}" for i, z in enumerate(logits.tolist()) if not math.isfinite(z)]
            error_msgs.append(
                f"{prefix}logits of AdaptiveAlpha must be finite, got {', '.join(bad)}; "
                "load an earlier checkpoint."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


# An operator, since torch.compile warns when it traces an autograd.Function.
@torch.library.custom_op("sparseformer::clamp_logits", mutates_args=())
def _clamp_logits(logits: Tensor) -> Tensor:
    """Clamp to +-_LOGIT_LIMIT; outside, pass on only the gradients whose descent leads back."""
    return logits.clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)


def _save_logits(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _grad_of_logits(ctx: Any, grad: Tensor) -> Tensor:
    (logits,) = ctx.saved_tensors
    outside = logits.abs() > _LOGIT_LIMIT
    return grad.masked_fill(outside & (grad * logits < 0), 0.0)


_clamp_logits.register_fake(torch.empty_like)
_clamp_logits.register_autograd(_grad_of_logits, setup_context=_save_logits)
