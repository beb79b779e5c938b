"""The endless sequence of training batches, which can start at any position."""

from sparseformer.data import Batch, EncodedPairs, Tokenizer, collate, epoch_batches


class BatchStream:
    """Hand out micro-batches in an order that is a pure function of (seed, epoch, index).

    Attributes:
        epoch: passes over the training rows that are complete.
        index: position of the next micro-batch within the epoch.
    """

    def __init__(
        self,
        encoded: EncodedPairs,
        tokenizer: Tokenizer,
        *,
        batch_tokens: int,
        seed: int,
        epoch: int = 0,
        index: int = 0,
    ) -> None:
        self._encoded = encoded
        self._tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        self._seed = seed
        self.epoch = epoch
        self.index = index
        self._order = self._epoch_order()

    def __next__(self) -> Batch:
        if self.index >= len(self._order):  # beyond it, when the data shrank since a checkpoint
            self.epoch, self.index = self.epoch + 1, 0
            self._order = self._epoch_order()
        rows = self._order[self.index]
        self.index += 1
        return collate(self._encoded, rows, self._tokenizer)

    def _epoch_order(self) -> list[list[int]]:
        return epoch_batches(self._encoded, self._batch_tokens, self._seed, self.epoch)
