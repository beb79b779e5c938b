"""Modules of the sparse losses, on logits and on hidden states, and the learned alpha of a loss."""

from typing import Literal, TypedDict

from torch import Tensor, nn

from sparseformer.functional import (
    am_softmax_loss,
    entmax15_loss,
    entmax_loss,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_sparse_cross_entropy,
    sparse_cross_entropy,
    sparsemax_loss,
)
from sparseformer.nn.mappings import AdaptiveAlpha

Reduction = Literal["none", "mean", "sum"]


Backend = Literal["auto", "pytorch", "triton"]


class _Options(TypedDict):
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    weight: Tensor | None
    backend: Backend


class _LinearOptions(_Options):
    softcap: float | None
    chunk_size: int | None


class _Loss(nn.Module):
    """What every loss has: rows left out, reduction, smoothing, class weights and backend."""

    weight: Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing
        self.backend: Backend = backend
        self.register_buffer("weight", weight)

    def _options(self) -> _Options:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "weight": self.weight,
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        parts = [f"ignore_index={self.ignore_index}", f"reduction={self.reduction!r}"]
        return ", ".join([*parts, f"label_smoothing={self.label_smoothing}"])


class _LinearLoss(_Loss):
    """A loss on hidden states; the output matrix, often tied, is an argument of forward."""

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        softcap: float | None = None,
        chunk_size: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            backend=backend,
        )
        self.softcap = softcap
        self.chunk_size = chunk_size

    def _options(self) -> _LinearOptions:
        return {**super()._options(), "softcap": self.softcap, "chunk_size": self.chunk_size}

    def extra_repr(self) -> str:
        tiles = f"softcap={self.softcap}, chunk_size={self.chunk_size}"
        return f"{super().extra_repr()}, {tiles}"


class _LossAlpha(nn.Module):
    """The alpha of a loss: a number, or one learned in (1, max_alpha)."""

    def __init__(self, alpha: float, learn_alpha: bool, max_alpha: float) -> None:
        super().__init__()
        self.fixed = float(alpha)
        self.adaptive = AdaptiveAlpha(1, alpha, 1.0, max_alpha) if learn_alpha else None

    def forward(self) -> float | Tensor:
        """Return a float, or a tensor of shape [] that carries a gradient."""
        return self.fixed if self.adaptive is None else self.adaptive()[0]

    def extra_repr(self) -> str:
        return f"{self.fixed}" if self.adaptive is None else ""


class SparseCrossEntropyLoss(_Loss):
    """Module form of `sparseformer.functional.sparse_cross_entropy`."""

    def __init__(
        self,
        k: int | None = None,
        top_p: float | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            backend=backend,
        )
        self.k, self.top_p = k, top_p

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return sparse_cross_entropy(logits, target, k=self.k, top_p=self.top_p, **self._options())

    def extra_repr(self) -> str:
        return f"k={self.k}, top_p={self.top_p}, {super().extra_repr()}"


class EntmaxLoss(_Loss):
    """Module form of `sparseformer.functional.entmax_loss`, with a fixed or a learned alpha.

    What a learned alpha does here: for class ids the loss falls as alpha rises, whatever the
    logits are (dL/dalpha = dH(p)/dalpha <= 0 without smoothing, and smoothing doesn't change
    that), so minimising the loss over its own alpha never finds an inner optimum: alpha climbs
    from where it starts to max_alpha, fast while predictions are uncertain, and not at all where
    p is one-hot. It is a schedule from dense to sparse that the model's own certainty sets, not a
    selection of alpha. So choose max_alpha as the alpha to end with, and alpha's learning rate as
    the speed; to select an alpha, compare fixed ones by a figure that doesn't contain it, such as
    accuracy. Losses at different alphas aren't comparable: a falling loss may be alpha alone.

    Args:
        alpha: 1 or more; with learn_alpha, the start, inside (1, max_alpha).
        learn_alpha: own an AdaptiveAlpha in place of the number. It wants no weight decay.
        max_alpha: upper end of a learned alpha.
        ignore_index: as for entmax_loss, like all that follow.
    """

    def __init__(
        self,
        alpha: float = 1.5,
        *,
        learn_alpha: bool = False,
        max_alpha: float = 2.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            backend=backend,
        )
        self.alpha = _LossAlpha(alpha, learn_alpha, max_alpha)

    def current_alpha(self) -> float | Tensor:
        """Return alpha: a float, or a tensor of shape [] that carries a gradient."""
        alpha: float | Tensor = self.alpha()
        return alpha

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(logits, target, self.current_alpha(), **self._options())


class SparsemaxLoss(_Loss):
    """Module form of `sparseformer.functional.sparsemax_loss`."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return sparsemax_loss(logits, target, **self._options())


class Entmax15Loss(_Loss):
    """Module form of `sparseformer.functional.entmax15_loss`."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return entmax15_loss(logits, target, **self._options())


class AMSoftmaxLoss(_Loss):
    """Module form of `sparseformer.functional.am_softmax_loss`; forward takes cosines."""

    def __init__(
        self,
        margin: float = 0.35,
        scale: float = 30.0,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            backend=backend,
        )
        self.margin, self.scale = margin, scale

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return am_softmax_loss(
            logits, target, margin=self.margin, scale=self.scale, **self._options()
        )

    def extra_repr(self) -> str:
        return f"margin={self.margin}, scale={self.scale}, {super().extra_repr()}"


class LinearCrossEntropy(_LinearLoss):
    """Module form of `sparseformer.functional.linear_cross_entropy`."""

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
    ) -> Tensor:
        return linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, **self._options()
        )


class LinearSparseCrossEntropy(_LinearLoss):
    """Module form of `sparseformer.functional.linear_sparse_cross_entropy`."""

    def __init__(
        self,
        k: int | None = None,
        top_p: float | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        softcap: float | None = None,
        chunk_size: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            softcap=softcap,
            chunk_size=chunk_size,
            backend=backend,
        )
        self.k, self.top_p = k, top_p

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
    ) -> Tensor:
        return linear_sparse_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            k=self.k,
            top_p=self.top_p,
            **self._options(),
        )

    def extra_repr(self) -> str:
        return f"k={self.k}, top_p={self.top_p}, {super().extra_repr()}"


class LinearEntmaxLoss(_LinearLoss):
    """Module form of `sparseformer.functional.linear_entmax_loss`; alpha as in EntmaxLoss."""

    def __init__(
        self,
        alpha: float = 1.5,
        *,
        learn_alpha: bool = False,
        max_alpha: float = 2.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        softcap: float | None = None,
        chunk_size: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            softcap=softcap,
            chunk_size=chunk_size,
            backend=backend,
        )
        self.alpha = _LossAlpha(alpha, learn_alpha, max_alpha)

    def current_alpha(self) -> float | Tensor:
        """Return alpha: a float, or a tensor of shape [] that carries a gradient."""
        alpha: float | Tensor = self.alpha()
        return alpha

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
    ) -> Tensor:
        return linear_entmax_loss(
            input,
            linear_weight,
            target,
            self.current_alpha(),
            linear_bias=linear_bias,
            **self._options(),
        )
