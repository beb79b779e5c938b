"""Greedy search and sampling: one hypothesis per sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseformer.generation.decoder import StepDecoder
from sparseformer.generation.rules import Hypothesis, SearchRules, require_numbers

# Copying the cache costs about as much as a step, so it is worth it once a quarter is done.
_SHRINK_BELOW = 0.75

Chooser = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """Take the most likely token."""

    rules: SearchRules

    def __call__(self, logits: Tensor, prefix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return tokens [len(rows)] and their log-probabilities."""
        log_prob, token = self.rules.log_probs(logits, prefix).max(-1)
        return token, log_prob


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Draw from the distribution at a temperature, cut to its most likely tokens.

    Token number i of the sorted vocabulary is drawn when uniform[row, step] falls between the
    cumulated probabilities of i - 1 and i. The uniform numbers belong to the sentence alone, so
    neither its batch mates nor the device change what is drawn.
    """

    rules: SearchRules
    uniform: Tensor  # float64 [num_rows, max_length] in [0, 1)
    temperature: float
    top_k: int
    top_p: float

    def __call__(self, logits: Tensor, prefix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [len(rows)] and their log-probabilities before top_k and top_p."""
        log_probs = self.rules.log_probs(logits, prefix, self.temperature)
        ranked, order = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = self._truncate(ranked.double().exp())
        cumulated = probs.cumsum(-1)
        threshold = self.uniform[rows, prefix.shape[1] - 1, None] * cumulated[:, -1:]
        rank = torch.searchsorted(cumulated, threshold, right=True)
        # The product above may round up to the whole mass, behind the last token that has any.
        rank = rank.minimum((probs > 0).sum(-1, keepdim=True) - 1).clamp_min(0)
        return order.gather(-1, rank).squeeze(-1), ranked.gather(-1, rank).squeeze(-1)

    def _truncate(self, probs: Tensor) -> Tensor:
        if self.top_k:
            probs[:, self.top_k :] = 0.0
        if self.top_p < 1.0:
            mass_before = probs.cumsum(-1) - probs
            probs = probs.masked_fill(mass_before >= self.top_p * probs.sum(-1, keepdim=True), 0.0)
        return probs


def uniform_numbers(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Draw float64 [len(seeds), count] in [0, 1), each row from a generator of its own."""
    drawn = [
        torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(drawn).to(device)


def search_single(
    decoder: StepDecoder,
    rules: SearchRules,
    choose: Chooser,
    *,
    num_rows: int,
    device: torch.device,
) -> list[Hypothesis]:
    """Extend every row by the chosen token until it ends; finished rows leave the batch.

    A row after which no token has a probability ends as it is.
    """
    tokens = torch.full((num_rows, rules.max_length + 1), rules.eos_id, device=device)
    tokens[:, 0] = rules.bos_id
    scores = torch.zeros(num_rows, device=device)
    rows = torch.arange(num_rows, device=device)
    is_open = torch.ones(num_rows, dtype=torch.bool, device=device)
    for length in range(1, rules.max_length + 1):
        prefix = tokens[rows, :length]
        token, log_prob = choose(decoder.next_logits(prefix), prefix, rows)
        require_numbers(log_prob[is_open], length)
        is_open &= log_prob > -torch.inf
        tokens[rows, length] = torch.where(is_open, token, rules.eos_id)
        scores[rows] += torch.where(is_open, log_prob, 0.0).to(scores.dtype)
        is_open &= token != rules.eos_id
        num_open = int(is_open.sum())
        if num_open == 0:
            break
        if num_open <= _SHRINK_BELOW * len(rows):
            index = is_open.nonzero().squeeze(1)
            decoder.keep(index)
            rows, is_open = rows[index], is_open[index]
    return _to_hypotheses(tokens[:, 1:], scores, rules.eos_id)


def _to_hypotheses(tokens: Tensor, scores: Tensor, eos_id: int) -> list[Hypothesis]:
    num_tokens = (tokens != eos_id).sum(-1)  # nothing but EOS follows the first EOS
    rows = zip(tokens.tolist(), num_tokens.tolist(), scores.tolist(), strict=True)
    return [Hypothesis(ids[:count], score) for ids, count, score in rows]
