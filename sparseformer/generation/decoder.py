"""What a search asks of a model, and the rows of the model that a search holds."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class DecoderCache(Protocol):
    """Keys and values of the tokens decoded so far."""

    def reorder(self, index: Tensor, /) -> None:
        """Make row i what row index[i] was; rows may repeat, so the batch grows or shrinks."""


class Seq2SeqModel(Protocol):
    """The part of sparseformer.nn.Seq2SeqTransformer that a search uses."""

    def encode(self, src: Tensor, src_length: Tensor, /) -> Any:
        """Return a NamedTuple with the fields states [B, S, d_model] and length [B]."""

    def new_cache(self, memory: Any, /) -> Any:
        """Return an empty DecoderCache for these encoder states."""

    def decode(self, tokens: Tensor, memory: Any, cache: Any, /) -> Tensor:
        """Return hidden states [B, T, d_model] of tokens [B, T] that follow those in the cache."""

    def logits(self, hidden: Tensor, /) -> Tensor:
        """Return scores [..., vocab_size] of every token."""

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over the module and all its parts, as nn.Module does."""

    def eval(self) -> Any:
        """Switch dropout off, as nn.Module does."""


class StepDecoder:
    """A batch of target prefixes that grow by one token per call.

    Without a cache every step decodes the whole prefix again, which is the definition that the
    cache has to agree with.
    """

    def __init__(
        self, model: Seq2SeqModel, src: Tensor, src_length: Tensor, *, use_cache: bool
    ) -> None:
        self._model = model
        self._memory = model.encode(src, src_length)
        self._cache: DecoderCache | None = model.new_cache(self._memory) if use_cache else None

    def next_logits(self, prefix: Tensor) -> Tensor:
        """Return logits [rows, vocab_size], in fp32 or better, of what follows prefix [rows, t]."""
        tokens = prefix if self._cache is None else prefix[:, -1:]
        hidden = self._model.decode(tokens, self._memory, self._cache)
        logits = self._model.logits(hidden[:, -1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def keep(self, index: Tensor, *, same_sources: bool = False) -> None:
        """Make row i what row index[i] was.

        Args:
            index: int64 [rows after], values below the rows before; they may repeat.
            same_sources: Every row keeps its source sentence (beams of one sentence swap places),
                so the encoder states needn't be copied.
        """
        if not same_sources:
            states, length = self._memory.states[index], self._memory.length[index]
            self._memory = self._memory._replace(states=states, length=length)
        if self._cache is not None:
            self._cache.reorder(index)
