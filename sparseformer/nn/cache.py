"""Keys and values that step-by-step decoding keeps, so that each token is computed once."""

from typing import NamedTuple

from torch import Tensor


class KeyValue(NamedTuple):
    """Keys and values of one attention layer, split into heads, [B, Hkv, L, D] each."""

    key: Tensor
    value: Tensor


class KeyValueCache:
    """Grow the keys and values of one self-attention layer at their end.

    The buffers double when they are full, so n appended tokens copy O(n) numbers, not O(n ** 2).
    It is for decoding: keys that need a gradient are refused, because buffers are written in place.
    """

    def __init__(self) -> None:
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> KeyValue:
        """Store new keys and values, and return all so far.

        Args:
            key: [B, Hkv, n, D], the positions after those in the cache.
            value: [B, Hkv, n, D].

        Returns:
            Views [B, Hkv, length, D] that stay right until `reorder`.

        Raises:
            ValueError: If gradients are recorded, or the batch differs from the cache's.
        """
        if key.requires_grad:
            raise ValueError(
                "A cache can't be used while gradients are recorded; decode under "
                "torch.inference_mode() or torch.no_grad(), or without a cache."
            )
        if self._key is not None and len(self._key) != len(key):
            raise ValueError(
                f"The batch has {len(key)} rows, but the cache has {len(self._key)}; call "
                "cache.reorder(index) when rows leave or are repeated."
            )
        start, self.length = self.length, self.length + key.shape[2]
        self._key = _grown(self._key, key, start, self.length)
        self._value = _grown(self._value, value, start, self.length)
        self._key[:, :, start : self.length] = key
        self._value[:, :, start : self.length] = value
        return KeyValue(self._key[:, :, : self.length], self._value[:, :, : self.length])

    def reorder(self, index: Tensor) -> None:
        """Keep the batch rows `index` (int64 [any]), in that order."""
        if self._key is not None and self._value is not None:
            self._key = self._key.index_select(0, index)
            self._value = self._value.index_select(0, index)


def _grown(buffer: Tensor | None, new: Tensor, start: int, length: int) -> Tensor:
    """Return a buffer with room for `length` positions that holds the first `start` of `buffer`."""
    if buffer is not None and buffer.shape[2] >= length:
        return buffer
    batch, heads, _, width = new.shape
    capacity = max(16, 1 << (length - 1).bit_length())
    grown = new.new_empty(batch, heads, capacity, width)
    if buffer is not None:
        grown[:, :, :start] = buffer[:, :, :start]
    return grown


class DecoderCache:
    """Hold what a decoder has computed: its own keys and values, and those of the memory.

    Args:
        cross: Per layer, the keys and values of the memory.
        memory_length: Real positions of each memory row, int [B].
    """

    def __init__(self, cross: list[KeyValue], memory_length: Tensor) -> None:
        self.cross = cross
        self.memory_length = memory_length
        self.self_attention = [KeyValueCache() for _ in cross]

    @property
    def length(self) -> int:
        """Decoded tokens so far."""
        return self.self_attention[0].length

    def reorder(self, index: Tensor) -> None:
        """Keep the batch rows `index` (int64 [any]), in that order: repeated, dropped or moved.

        Args:
            index: Rows of the present batch; its size is the next batch size.
        """
        self.memory_length = self.memory_length.index_select(0, index)
        self.cross = [KeyValue(*(t.index_select(0, index) for t in layer)) for layer in self.cross]
        for layer in self.self_attention:
            layer.reorder(index)
