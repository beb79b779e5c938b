"""The attention function that transformers calls in the place of its own."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparseformer.functional import entmax_attention
from sparseformer.integrations.transformers.heads import CHILD
from sparseformer.integrations.transformers.masks import attention_mask, padding_of
from sparseformer.nn.attention_map import AttentionOptions

# Names with "flash", "/" or a leading "paged|" take other paths inside transformers.
NAME = "sparseformer"


class Attends(Protocol):
    """What stands in for a module's own attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor: ...


def register() -> None:
    """Make "sparseformer" an attention implementation of transformers; calling it again is fine.

    Raises:
        ValueError: If transformers is older than 5.15, where T5 takes no attention function.
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < (5, 15):
        raise ValueError(
            f"transformers is {transformers.__version__}, but sparse attention needs 5.15 or later."
        )
    AttentionInterface.register(NAME, attention_forward)
    # Without this one the padding mask would be dropped, and padding attended.
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the HeadMap of a module says, or with softmax where it has none.

    Args:
        module: The attention module.
        query: [B, H, Lq, D].
        key: [B, Hkv, Lk, D].
        value: [B, Hkv, Lk, Dv].
        attention_mask: What `masks.attention_mask` returned.
        dropout: Of the probabilities.
        scaling: Factor of the scores; unset, D ** -0.5.
        is_causal: Unset, the module's own attribute.
        position_bias: [1, H or 1, Lq, Lk], a function of j - i for each head, as T5's.
        sliding_window: Keys that a query sees on a side, itself included.
        **kwargs: The rest of what models pass; what would change the result is refused.

    Returns:
        [B, Lq, H, Dv], contiguous, and None for the probabilities, which are never whole.

    Raises:
        ValueError: For what sparse attention can't do, which it names.
    """
    _refuse_unsupported(module, attention_mask, key.shape[2], kwargs)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options = AttentionOptions(
        is_causal=causal,
        key_start=None,
        key_length=None,
        cu_seqlens_q=kwargs.get("cu_seq_lens_q"),
        cu_seqlens_k=kwargs.get("cu_seq_lens_k"),
        relative_bias=None,
        window=None,
        dropout_p=dropout,
        scale=scaling,
        backend="auto",
    )
    if attention_mask is not None and attention_mask.dim() == 1:
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = attention_mask
    elif attention_mask is not None:
        options["key_start"], options["key_length"] = padding_of(attention_mask)
    if position_bias is not None:
        options["relative_bias"] = relative_bias(position_bias, query.shape[1])
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    attends: Attends | None = getattr(module, CHILD, None)
    if attends is None:
        output = entmax_attention(query, key, value, 1.0, **options)
    else:
        output = attends.attend(query, key, value, options)
    return output.transpose(1, 2).contiguous(), None


def relative_bias(position_bias: Tensor, num_heads: int) -> Tensor:
    """Turn a bias [1, H or 1, Lq, Lk] that depends on j - i into one entry per offset.

    The first column holds the offsets up to 0, the first row the others; the gradient of an entry
    stands for its whole diagonal.

    Returns:
        [H, Lq + Lk - 1].

    Raises:
        ValueError: If the rows of the batch have biases of their own.
    """
    if position_bias.shape[0] != 1:
        raise ValueError(
            f"position_bias has shape {list(position_bias.shape)}, but sparse attention takes one "
            "bias for all rows of a batch: [1, H, Lq, Lk]."
        )
    bias = position_bias[0]
    entries = torch.cat([bias[:, :, 0].flip(-1), bias[:, 0, 1:]], dim=-1)
    return entries.expand(num_heads, -1)


def _refuse_unsupported(
    module: nn.Module, mask: Tensor | None, num_keys: int, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions is True, but sparse attention never holds the probabilities; use "
            "record_density to see how sparse each head is."
        )
    for argument in ("softcap", "s_aux"):
        if kwargs.get(argument) is not None:
            raise ValueError(f"{name} passes {argument}, which sparse attention doesn't have.")
    if mask is None or (mask.dim() == 1 and not mask.dtype.is_floating_point):
        return
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"{name} got a mask of {mask.dtype} {list(mask.shape)}; sparse attention takes padding "
            "masks [B, L], which the model turns into what it needs."
        )
    if mask.shape[1] != num_keys:
        raise ValueError(
            f"{name} got {num_keys} keys and a mask of {mask.shape[1]}, as a static cache gives; "
            "use a dynamic cache."
        )
