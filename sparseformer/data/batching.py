"""Which rows form a batch, as a pure function of seed and epoch, and how rows become tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparseformer.data.encoding import EncodedPairs
from sparseformer.data.tokenizer import IGNORED, Tokenizer

# A window holds about this many batches: rows are sorted by length inside it, and nowhere else.
WINDOW_BATCHES = 64


class Batch(NamedTuple):
    """Padded int64 tensors of some rows."""

    src: Tensor
    """[B, S], padded with pad_id."""
    src_length: Tensor
    """[B], EOS included."""
    decoder_input: Tensor
    """[B, T], bos_id first, padded with pad_id; never -100."""
    labels: Tensor
    """[B, T], EOS included, padded with -100."""
    rows: tuple[int, ...]
    """Where the rows stand in their split."""
    num_targets: int
    """Labels other than -100."""


def epoch_batches(
    encoded: EncodedPairs, batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Deal every row into exactly one batch of similar lengths, in the random order of one epoch.

    Rows are shuffled, sorted by length within windows of about 64 batches, and packed so that
    `rows * (longest source + longest target) <= batch_tokens`; then the batches are shuffled. A row
    that is longer than the budget forms a batch alone. The result depends on the arguments only, so
    a resumed run goes on where it stopped without a stored generator.

    Args:
        encoded: Token ids of the training split.
        batch_tokens: Padded source plus target tokens of one batch, 1 or more.
        seed: Seed of the run, 0 or more.
        epoch: Which pass over the rows, 0 or more.

    Returns:
        Row numbers of each batch.

    Raises:
        ValueError: If batch_tokens is below 1, or seed or epoch is negative.
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed is {seed} and epoch is {epoch}, but both must be 0 or more.")
    src, tgt = _lengths(encoded.src), _lengths(encoded.tgt)
    if not len(src):
        return []
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = generator.permutation(len(src))
    rows_per_batch = batch_tokens / float((src + tgt).mean())
    window = max(1, round(WINDOW_BATCHES * rows_per_batch))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        rows = order[start : start + window]
        batches += _pack_by_length(rows, src, tgt, batch_tokens)
    return [batches[i] for i in generator.permutation(len(batches))]


def eval_batches(encoded: EncodedPairs, batch_tokens: int) -> list[list[int]]:
    """Deal every row into exactly one batch, from the shortest rows to the longest.

    Args:
        encoded: Token ids of a split.
        batch_tokens: Padded source plus target tokens of one batch, 1 or more.

    Returns:
        Row numbers of each batch; a row that is longer than the budget forms a batch alone.

    Raises:
        ValueError: If batch_tokens is below 1.
    """
    src, tgt = _lengths(encoded.src), _lengths(encoded.tgt)
    return _pack_by_length(np.arange(len(src)), src, tgt, batch_tokens)


def collate(encoded: EncodedPairs, rows: Sequence[int], tokenizer: Tokenizer) -> Batch:
    """Pad rows into tensors; the decoder's input is the target shifted right behind BOS.

    Args:
        encoded: Token ids of a split; left as they are.
        rows: Row numbers, in the order of the batch, at least one.
        tokenizer: Gives pad_id and bos_id.

    Returns:
        A batch whose padding has no loss: labels are -100 there.
    """
    src = [encoded.src[row] for row in rows]
    tgt = [encoded.tgt[row] for row in rows]
    shifted = [[tokenizer.bos_id, *row[:-1]] for row in tgt]
    return Batch(
        src=_pad(src, tokenizer.pad_id),
        src_length=torch.tensor([len(row) for row in src]),
        decoder_input=_pad(shifted, tokenizer.pad_id),
        labels=_pad(tgt, IGNORED),
        rows=tuple(rows),
        num_targets=sum(len(row) for row in tgt),
    )


def _pad(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def _lengths(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))


def _pack_by_length(
    rows: np.ndarray, src: np.ndarray, tgt: np.ndarray, batch_tokens: int
) -> list[list[int]]:
    """Sort rows by total length, then fill one batch after the other up to the padded budget."""
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}, but it must be 1 or more.")
    ranked = rows[np.lexsort((src[rows], src[rows] + tgt[rows]))]
    batches: list[list[int]] = []
    batch: list[int] = []
    longest_src = longest_tgt = 0
    for row, src_length, tgt_length in zip(
        ranked.tolist(), src[ranked].tolist(), tgt[ranked].tolist(), strict=True
    ):
        longest_src, longest_tgt = max(longest_src, src_length), max(longest_tgt, tgt_length)
        if batch and (len(batch) + 1) * (longest_src + longest_tgt) > batch_tokens:
            batches.append(batch)
            batch, longest_src, longest_tgt = [], src_length, tgt_length
        batch.append(row)
    if batch:
        batches.append(batch)
    return batches
