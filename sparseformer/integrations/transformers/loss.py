"""The truncated cross-entropy as the loss of a transformers Trainer."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseformer.functional import linear_sparse_cross_entropy, sparse_cross_entropy
from sparseformer.integrations.transformers.probe import trial_inputs
from sparseformer.nn.losses import Backend
from sparseformer.nn.modes import evaluating

IGNORED = -100


class SparseTopKLoss:
    """Compute sparse_cross_entropy of what a language model returns, for Trainer.

        Trainer(model, ..., compute_loss_func=SparseTopKLoss(model, k=64))

    Labels of -100 don't count. Whether logits and labels stand side by side (T5, BART, masked
    language models) or the label of a position comes next (GPT-2, Llama) is found out by asking the
    model for its own loss once.

    fused=True saves the logits: in training mode the output layer hands on an empty tensor, and
    the loss goes from the hidden states that it got to the gradients, tile by tile. In evaluation
    mode the model gives its logits as usual.

    Args:
        model: The model that is trained, with a language modelling head.
        k: Classes that the sum keeps; 64 when neither k nor top_p is given.
        top_p: Softmax mass that the sum keeps, in (0, 1].
        label_smoothing: Share of the target's mass that is spread over the kept classes.
        fused: Whether training goes without logits. The output layer must be one nn.Linear in one
            process or under DDP; not under FSDP, which shards its matrix.
        backend: As for `sparseformer.functional.sparse_cross_entropy`.

    Raises:
        ValueError: If the model has no output layer, or computes something after it that the fused
            loss doesn't know.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        k: int | None = None,
        top_p: float | None = None,
        label_smoothing: float = 0.0,
        fused: bool = False,
        backend: Backend = "auto",
    ) -> None:
        self.k = k
        self.top_p = top_p
        self.label_smoothing = label_smoothing
        self.backend: Backend = backend
        self.shifts_labels = labels_are_shifted(model)
        self.head = FusedHead(model) if fused else None

    def __call__(
        self,
        outputs: Any,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the loss of a batch.

        Args:
            outputs: What the model returned, with logits [B, L, V].
            labels: [B, L] class ids, or -100.
            num_items_in_batch: Labels of the whole optimiser step, by which the sum is divided;
                unset, those of this batch.

        Returns:
            One number.
        """
        if self.shifts_labels:
            labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        total = self._sum(logits, labels)
        if num_items_in_batch is None:
            return total / (labels != IGNORED).sum().clamp_min(1)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        hidden = None if self.head is None else self.head.take()
        if hidden is None or logits.shape[-2]:
            return sparse_cross_entropy(
                logits,
                labels,
                k=self._k(logits.shape[-1]),
                top_p=self.top_p,
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=self.label_smoothing,
                backend=self.backend,
            )
        assert self.head is not None
        return linear_sparse_cross_entropy(
            hidden,
            self.head.weight,
            labels,
            linear_bias=self.head.bias,
            k=self._k(self.head.weight.shape[0]),
            top_p=self.top_p,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
            softcap=self.head.softcap,
            backend=self.backend,
        )

    def _k(self, num_classes: int) -> int | None:
        if self.k is None and self.top_p is None:
            return min(64, num_classes)
        return self.k


class FusedHead:
    """Keep the hidden states that reach the output layer in training, and skip the logits.

    Args:
        model: A model whose output layer is one nn.Linear.

    Raises:
        ValueError: If it isn't, or if logits aren't what this class makes of the hidden states.
    """

    def __init__(self, model: Any) -> None:
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"The output layer of {type(model).__name__} is {layer}, but a fused loss needs an "
                "nn.Linear; use fused=False."
            )
        self._layer = layer
        self._model = model
        self._hidden: Tensor | None = None
        self._always = False
        self._handle = layer.register_forward_pre_hook(self._keep)
        with ExitStack() as undo:
            undo.callback(self.remove)
            self._check()
            undo.pop_all()

    @property
    def weight(self) -> Tensor:
        """The output matrix [V, D]."""
        return self._layer.weight

    @property
    def bias(self) -> Tensor | None:
        """What is added to the logits [V]: the layer's bias, and BART's final_logits_bias."""
        final: Tensor | None = getattr(self._model, "final_logits_bias", None)
        own: Tensor | None = self._layer.bias
        if final is None:
            return own
        return final[0] if own is None else own + final[0]

    @property
    def softcap(self) -> float | None:
        """The bound of the logits, where the model has one (Gemma)."""
        cap: float | None = getattr(self._model.config, "final_logit_softcapping", None)
        return cap

    def take(self) -> Tensor | None:
        """Return the hidden states [B, L, D] of the last training forward, once."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def remove(self) -> None:
        """Let the model give its logits in training mode again."""
        self._handle.remove()

    def _keep(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not (layer.training or self._always):
            return None
        (self._hidden,) = arguments
        return (self._hidden[:, :0],)

    def _check(self) -> None:
        """Compare the model's logits with those of the hidden states."""
        inputs = trial_inputs(self._model)
        with evaluating(self._model), torch.no_grad():
            expected = self._model(**inputs).logits
            self._always = True
            self._model(**inputs)
            self._always = False
            hidden = self.take()
            assert hidden is not None
            found = F.linear(hidden, self.weight, self.bias)
            if self.softcap is not None:
                found = self.softcap * torch.tanh(found / self.softcap)
        size = expected.abs().max()
        if found.shape != expected.shape or bool((found - expected).abs().max() > 1e-2 * size):
            raise ValueError(
                f"{type(self._model).__name__} changes its logits after the output layer, which "
                "the fused loss can't follow; use fused=False."
            )


def labels_are_shifted(model: nn.Module) -> bool:
    """Ask the model's own loss whether a label belongs to the position before it.

    A row whose first label is the only one has no label left where labels are shifted, so that the
    mean over none is NaN, or 0.

    Raises:
        ValueError: If the model has no output layer.
    """
    own: Any = model
    if own.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no language modelling head, so no labels for this loss."
        )
    inputs = trial_inputs(model)
    labels = torch.full_like(inputs["input_ids"], IGNORED)
    labels[:, 0] = inputs["input_ids"][:, 0]
    with evaluating(model), torch.no_grad():
        loss = model(**inputs, labels=labels).loss
    return not bool(loss.isfinite()) or float(loss) == 0.0
