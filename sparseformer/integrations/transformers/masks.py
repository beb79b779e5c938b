"""What transformers says about visible keys, as the padding and packing of our attention."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Patterns of transformers.masking_utils that the attention function applies by itself, from the
# module's is_causal and sliding_window.
_KNOWN = frozenset(
    {
        "causal_mask_function",
        "bidirectional_mask_function",
        "and_masks.<locals>.and_mask",
        "sliding_window_overlay.<locals>.inner_mask",
        "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    }
)
# Several sequences in one row: positions start again, and sequences don't see each other.
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_PACKED_POSITIONS = "remap_positions_for_packed_sequence.<locals>.inner_mask"


class Padding(NamedTuple):
    """The keys [start, end) that each row of a batch may see, int64 [B] each."""

    start: Tensor
    end: Tensor


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return what the layers of a model get as their mask (an AttentionMaskInterface function).

    The arguments are those that transformers passes by name; causality and windows are left to the
    attention function.

    Returns:
        None if nothing is padded; bool [B, kv_length], true at real keys; or, for packed sequences,
        int32 [S + 1], where each of them starts.

    Raises:
        ValueError: For a static cache, a padding mask with holes, or a pattern that our attention
            has no arguments for.
    """
    _refuse_static_cache(q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    patterns = dict(_patterns(mask_function)) if mask_function is not None else {}
    if unknown := patterns.keys() - _KNOWN - {_PACKED, _PACKED_POSITIONS}:
        raise ValueError(
            f"The model asks for an attention pattern that sparse attention can't express: "
            f"{', '.join(sorted(unknown))}."
        )
    if _PACKED in patterns:
        return _packed_bounds(patterns[_PACKED], batch_size)
    if attention_mask is None:
        return None
    # A cache of a sliding window holds the last keys only.
    attention_mask = attention_mask[:, -kv_length:].bool()
    if bool(attention_mask.all()):
        return None
    _refuse_holes(attention_mask)
    return attention_mask


def padding_of(mask: Tensor) -> Padding:
    """Return the visible keys of a bool mask [B, K] without holes; an empty row sees none."""
    num_keys = mask.shape[1]
    index = torch.arange(num_keys, device=mask.device)
    start = torch.where(mask, index, num_keys).amin(1)
    return Padding(start, torch.where(mask, index + 1, 0).amax(1))


def _refuse_static_cache(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any] | None,
    mask: Tensor | None,
) -> None:
    is_causal = mask_function is not None and "causal_mask_function" in dict(
        _patterns(mask_function)
    )
    ahead = is_causal and isinstance(q_offset, int) and kv_offset + kv_length > q_offset + q_length
    short = mask is not None and mask.shape[-1] < kv_length
    if isinstance(q_offset, Tensor) or ahead or short:
        raise ValueError(
            "Sparse attention got keys that are not written yet, as a static cache holds them; "
            "use a dynamic cache (cache_implementation='dynamic')."
        )


def _refuse_holes(mask: Tensor) -> None:
    start, end = padding_of(mask)
    holes = (end - start).clamp_min(0) != mask.sum(1)
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        raise ValueError(
            f"Row {row} of the attention mask hides keys between visible ones; sparse attention "
            "takes padding at the two ends of a row only."
        )


def _patterns(function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the parts that a mask function of transformers is made of, by name."""
    yield getattr(function, "__qualname__", type(function).__name__), function
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part):
                yield from _patterns(part)


def _packed_bounds(function: Callable[..., Any], batch_size: int) -> Tensor:
    if batch_size != 1:
        raise ValueError(
            f"position_ids start again inside of rows, so these hold several sequences; sparse "
            f"attention takes packed sequences as a batch of 1 row, not {batch_size}. For one "
            "sequence in each row, pass an attention_mask."
        )
    (cell,) = function.__closure__ or ()
    ids: Tensor = cell.cell_contents[0]
    starts = (ids.diff() != 0).nonzero()[:, 0] + 1
    ends = starts.new_tensor([0, ids.shape[0]])
    return torch.cat([ends[:1], starts, ends[1:]]).to(torch.int32)
