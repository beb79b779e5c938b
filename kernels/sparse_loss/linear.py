"""Chunked evaluation of a loss on hidden states: [tokens, vocabulary] is never whole in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseformer.kernels.sparse_loss.candidates import Candidates
from sparseformer.kernels.sparse_loss.products import DENSE_COST_SHARE
from sparseformer.kernels.sparse_loss.reference import entmax_kept, truncated_kept
from sparseformer.kernels.sparse_loss.results import Request, RowLoss
from sparseformer.kernels.sparse_loss.rules import Rule
from sparseformer.kernels.sparse_loss.selection import (
    collect_on,
    empty_top_k,
    merge_top_k_on,
)
from sparseformer.kernels.sparse_loss.targets import Targets

# Up to this many logits are computed at once, and the gradient's coefficients kept.
WHOLE_LOGITS = 2**24
# Else the logits come in tiles of this many: 8 MiB in float32.
TILE_LOGITS = 2**21
TILE_TOKENS = 256
# A GPU wants larger products, and fewer launches.
GPU_TILE_LOGITS = 2**24
GPU_TILE_TOKENS = 4096


@dataclass(frozen=True)
class Head:
    """The output projection: `z = cap tanh((h W^T + b) / cap)`, without a cap `h W^T + b`."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    softcap: float | None
    dtype: torch.dtype  # of the scores

    def scores(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return the logits [n, stop - start] of hidden states [n, D] for classes start to stop."""
        bias = None if self.bias is None else self.bias[start:stop]
        scores = F.linear(hidden, self.weight[start:stop], bias).to(self.dtype)
        if self.softcap is None:
            return scores
        scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        # An excluded class stays excluded, though the cap of -inf is finite.
        return scores if bias is None else scores.masked_fill_(bias == -torch.inf, -torch.inf)

    def through_cap(self, coefficients: Tensor, scores: Tensor) -> Tensor:
        """Return the coefficients on capped scores as coefficients on what the cap is put on."""
        if self.softcap is None:
            return coefficients
        slope = 1.0 - (scores / self.softcap).square()
        return coefficients * slope.masked_fill(scores == -torch.inf, 0.0)


@dataclass(frozen=True)
class Tiling:
    """How the logits are cut: all at once, or tiles of tokens by classes."""

    whole: bool
    tokens: int
    classes: int
    row_tokens: int  # tokens of a tile that has every class
    logits: int  # most in one tile

    @classmethod
    def choose(
        cls, num_tokens: int, num_classes: int, chunk_size: int | None, is_gpu: bool = False
    ) -> "Tiling":
        """Return tiles of chunk_size tokens, or of a size that is quick and small."""
        logits = GPU_TILE_LOGITS if is_gpu else TILE_LOGITS
        whole = chunk_size is None and num_tokens * num_classes <= WHOLE_LOGITS
        if whole:
            return cls(True, max(num_tokens, 1), num_classes, max(num_tokens, 1), logits)
        row_tokens = max(logits // num_classes, 1)
        tile_tokens = GPU_TILE_TOKENS if is_gpu else TILE_TOKENS
        tokens = max(tile_tokens, row_tokens) if chunk_size is None else chunk_size
        classes = min(max(logits // tokens, 1), num_classes)
        return cls(False, tokens, classes, min(tokens, row_tokens), logits)


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive (start, stop) of at most `size`."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


@dataclass(frozen=True)
class LinearRows:
    """The rows of one call that count, and how to evaluate spans of them."""

    hidden: Tensor  # [n, D]
    head: Head
    targets: Targets
    alpha: Tensor | None  # [], [n]
    rows: Tensor | None  # [n] places in the flat batch; None: all of it
    rule: Rule
    tiling: Tiling
    request: Request

    def results(self) -> Iterator[tuple[int, int, RowLoss]]:
        """Yield the loss of consecutive spans of rows."""
        for start, stop in spans(0, self.hidden.shape[0], self.tiling.tokens):
            result = self._tiled(start, stop)
            if result is not None:
                yield start, stop, result
                continue
            for first, last in spans(start, stop, self.tiling.row_tokens):
                yield first, last, self.evaluate(first, last)

    def evaluate(self, start: int, stop: int) -> RowLoss:
        """Return the loss of a span from all of its logits at once."""
        scores = self.head.scores(self.hidden[start:stop], 0, self.head.weight.shape[0])
        top = scores.amax(-1)
        self._refuse(scores, top, start, 0)
        targets, alpha = self.targets.slice(start, stop), self.alpha_of(start, stop)
        return self.rule.evaluate(scores, top, targets, alpha, self.request)

    def _tiled(self, start: int, stop: int) -> RowLoss | None:
        """Return the loss of a span class tile by class tile; None where that can't be."""
        num_classes = self.head.weight.shape[0]
        # The kernels find what a row keeps more quickly than the ways for whole rows do.
        if self.tiling.classes >= num_classes and self.request.backend == "pytorch":
            return None
        truncation = self.rule.truncation
        if truncation is None:
            if self.rule.is_dense:
                return None
            buffered = self.request.backend == "triton"
            return (self._entmax_buffered if buffered else self._entmax_tiled)(start, stop)
        if truncation.k is None or truncation.k * DENSE_COST_SHARE > num_classes:
            return None
        return self._top_k_tiled(start, stop, truncation.k)

    def _top_k_tiled(self, start: int, stop: int, k: int) -> RowLoss:
        kept, columns, target_scores = self.kept_top_k(start, stop, k)
        # What is left at -1 has the score -inf, and any class will do.
        columns, top = columns.clamp_(min=0), kept.amax(-1)
        targets = self.targets.slice(start, stop)
        return truncated_kept(kept, columns, top, targets, target_scores, self.request)

    def kept_top_k(self, start: int, stop: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k largest scores, their classes, and the targets' scores, of a span of rows.

        In slots beyond the number of classes the score is -inf and the class -1, and so is the
        score of a target that is none of the classes.
        """
        targets = self.targets.slice(start, stop)
        target_scores = self._no_scores(stop - start)
        kept, columns = empty_top_k(stop - start, k, target_scores)
        for first, scores in self._tiles(start, stop):
            read_targets(target_scores, scores, first, targets)
            kept, columns = merge_top_k_on(self.request.backend, scores, first, kept, columns)
            self._refuse(scores, kept.amax(-1), start, first)
            del scores  # before the next tile is made
        return kept, columns, target_scores

    def _entmax_tiled(self, start: int, stop: int) -> RowLoss | None:
        """Collect the candidates for the support; None if that is a wide share of the rows."""
        targets, alpha = self.targets.slice(start, stop), self.alpha_of(start, stop)
        target_scores, top = self._no_scores(stop - start), self._no_scores(stop - start)
        limit = self.tiling.logits // DENSE_COST_SHARE
        candidates = Candidates(top, alpha, limit, self.tiling.logits)
        for first, scores in self._tiles(start, stop):
            read_targets(target_scores, scores, first, targets)
            top = torch.maximum(top, scores.amax(-1))
            self._refuse(scores, top, start, first)
            if not candidates.add(scores, top, first):
                return None
            del scores  # before the next tile is made
        padded = candidates.padded()
        if padded is None:
            return None
        return entmax_kept(*padded, top, targets, target_scores, alpha, self.request)

    def _entmax_buffered(self, start: int, stop: int) -> RowLoss | None:
        """As _entmax_tiled with buffers of a fixed size; the device is read once, at the end."""
        targets, alpha = self.targets.slice(start, stop), self.alpha_of(start, stop)
        num_rows, room = stop - start, self.buffer_room
        target_scores, top = self._no_scores(num_rows), self._no_scores(num_rows)
        kept, columns = empty_top_k(num_rows, room, top)
        counts = torch.zeros(num_rows, dtype=torch.int32, device=top.device)
        reach = _reach(alpha, num_rows)
        for first, scores in self._tiles(start, stop):
            read_targets(target_scores, scores, first, targets)
            collect_on(self.request.backend, scores, first, top, reach, kept, columns, counts)
            self._refuse(scores, top, start, first)
            del scores
        if num_rows == 0 or int(counts.max()) > room:
            return None
        columns.clamp_(min=0)
        return entmax_kept(kept, columns, top, targets, target_scores, alpha, self.request)

    @property
    def buffer_room(self) -> int:
        """The candidates that a row may have: few enough for a sparse product, and for memory."""
        per_row = self.tiling.logits // (DENSE_COST_SHARE // 2 * self.tiling.tokens)
        return max(min(self.head.weight.shape[0] // DENSE_COST_SHARE, per_row), 1)

    def _tiles(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        hidden = self.hidden[start:stop]
        for first, last in spans(0, self.head.weight.shape[0], self.tiling.classes):
            yield first, self.head.scores(hidden, first, last)

    def alpha_of(self, start: int, stop: int) -> float | Tensor:
        """Return alpha of a span of rows: a float, or a tensor [1, 1] or [n, 1]."""
        return self.rule.alpha_of(self.alpha, None, start, stop)

    def _no_scores(self, num_rows: int) -> Tensor:
        return self.hidden.new_full((num_rows,), -torch.inf, dtype=self.head.dtype)

    def _refuse(self, scores: Tensor, top: Tensor, first_row: int, first_class: int) -> None:
        source = "input, linear_weight and linear_bias"
        self.rule.refuse_bad_logits(scores, top, self.rows, source, first_row, first_class)


def _reach(alpha: float | Tensor, num_rows: int) -> float | Tensor:
    """Return 1 / (alpha - 1), as a number or one for each row."""
    if isinstance(alpha, Tensor):
        return (1.0 / (alpha - 1.0)).expand(num_rows, 1).reshape(-1)
    return 1.0 / (alpha - 1.0)


def read_targets(target_scores: Tensor, scores: Tensor, first: int, targets: Targets) -> None:
    """Write the scores of the targets that this tile of classes holds."""
    assert targets.ids is not None
    places = targets.ids - first
    inside = (places >= 0) & (places < scores.shape[-1])
    found = scores.gather(-1, places.clamp_(0, scores.shape[-1] - 1)[:, None])[:, 0]
    torch.where(inside, found, target_scores, out=target_scores)
