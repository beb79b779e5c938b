"""Beam search over a batch, exact in when it stops."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.generation.decoder import StepDecoder
from sparseformer.generation.rules import Hypothesis, SearchRules, require_numbers


class _Beams(NamedTuple):
    """Open hypotheses, best first; a score of -inf marks a place that nothing fills."""

    sentences: Tensor  # [A], which sentence of the batch
    prefix: Tensor  # [A, W, t], BOS included
    scores: Tensor  # [A, W], sums of log-probabilities


class _Candidates(NamedTuple):
    """The best continuations of one step by their sums of log-probabilities, best first."""

    scores: Tensor  # [A, C]
    source: Tensor  # [A, C], which beam is continued
    token: Tensor  # [A, C]


class _Best:
    """The best complete hypothesis of every sentence so far, and the scores of the next best."""

    def __init__(
        self, num_sentences: int, max_length: int, beam_size: int, device: torch.device
    ) -> None:
        self.scores = torch.full((num_sentences,), -torch.inf, device=device)
        self.top = torch.full((num_sentences, beam_size), -torch.inf, device=device)
        self._tokens = torch.zeros(num_sentences, max_length, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(num_sentences, dtype=torch.int64, device=device)

    def offer(self, sentences: Tensor, prefix: Tensor, scores: Tensor) -> None:
        """Take prefix [A, t] where its score [A] beats what the sentence has."""
        better = scores > self.scores[sentences]
        rows, ids = sentences[better], prefix[better, 1:]
        self._tokens[rows, : ids.shape[1]] = ids
        self._lengths[rows] = ids.shape[1]
        self.scores[rows] = scores[better].to(self.scores.dtype)

    def count(self, sentences: Tensor, scores: Tensor) -> None:
        """Note the scores [A, C] of complete hypotheses; -inf is none."""
        every = torch.cat([self.top[sentences], scores.to(self.top.dtype)], dim=1)
        self.top[sentences] = every.topk(self.top.shape[1], dim=1).values

    def hypotheses(self) -> list[Hypothesis]:
        """Return one hypothesis per sentence."""
        columns = (self._tokens.tolist(), self._lengths.tolist(), self.scores.tolist())
        return [Hypothesis(ids[:n], score) for ids, n, score in zip(*columns, strict=True)]


def beam_search(
    decoder: StepDecoder,
    rules: SearchRules,
    *,
    num_sentences: int,
    device: torch.device,
    beam_size: int,
    length_penalty: float,
) -> list[Hypothesis]:
    """Return the hypothesis with the highest sum of log-probabilities / length ** penalty.

    At each step an EOS among the beam_size best continuations completes a hypothesis, and the
    beam_size best others stay open. A sentence is done when no open hypothesis can still beat its
    best complete one, however it goes on, unless the constraints ask for another end. Open
    hypotheses of max_length tokens count as complete. When no token has a probability and nothing
    is complete, the best open hypothesis is returned.

    Args:
        decoder: Holds one row per sentence.
        rules: Which tokens may follow, and the longest output.
        num_sentences: Rows of the decoder.
        device: Where the model lives.
        beam_size: Open hypotheses per sentence.
        length_penalty: Any sign; above 0 favours long output, below 0 short output.
    """
    best = _Best(num_sentences, rules.max_length, beam_size, device)
    beams = _Beams(
        torch.arange(num_sentences, device=device),
        torch.full((num_sentences, 1, 1), rules.bos_id, device=device),
        torch.zeros(num_sentences, 1, device=device),
    )
    for length in range(1, rules.max_length + 1):
        penalty = float(length) ** length_penalty
        candidates = _continue(decoder, rules, beams, beam_size)
        require_numbers(candidates.scores[:, 0], length)
        is_end = candidates.token == rules.eos_id
        _offer_completed(best, beams, candidates, is_end, beam_size, penalty)
        chosen = _choose_open(candidates, is_end, beam_size)
        _offer_survivors(best, beams, chosen, length - 1, length_penalty)
        prefix = torch.cat([_gather(beams.prefix, chosen.source), chosen.token[:, :, None]], -1)
        if length == rules.max_length:
            best.offer(beams.sentences, prefix[:, 0], chosen.scores[:, 0] / penalty)
            break
        can_win = _can_win(
            best, beams.sentences, chosen.scores[:, 0], rules, length, length_penalty
        )
        if not bool(can_win.any()):
            break
        _keep_rows(decoder, beams, chosen.source, can_win)
        beams = _Beams(beams.sentences[can_win], prefix[can_win], chosen.scores[can_win])
    return best.hypotheses()


def _can_win(
    best: _Best,
    sentences: Tensor,
    scores: Tensor,
    rules: SearchRules,
    length: int,
    length_penalty: float,
) -> Tensor:
    """Say of each sentence whether its best open hypothesis, of `length` tokens, is worth it."""
    stopping = rules.constraints.beam_stopping
    if stopping == "exact":
        # Sums only fall, so the divisor that brings them closest to 0 gives the bound.
        lengths = (float(length + 1), float(rules.max_length))
        divisor: float = max(n**length_penalty for n in lengths)
        return scores / divisor > best.scores[sentences]
    worst = best.top[sentences, -1]
    if stopping == "full":
        return worst.isneginf() & ~scores.isneginf()
    divisor = float(length) ** length_penalty
    return scores / divisor > worst


def _continue(
    decoder: StepDecoder, rules: SearchRules, beams: _Beams, beam_size: int
) -> _Candidates:
    """Find the 2 * beam_size best continuations: at most half of them end with EOS."""
    flat_prefix = beams.prefix.flatten(0, 1)
    log_probs = rules.log_probs(decoder.next_logits(flat_prefix), flat_prefix)
    vocab_size = log_probs.shape[-1]
    before = beams.scores.flatten()[:, None]
    # Whatever the model says after a place that nothing fills, NaN too, must stay out.
    totals = (before + log_probs).masked_fill(before == -torch.inf, -torch.inf)
    totals = totals.view(len(beams.sentences), -1)
    scores, place = totals.topk(min(2 * beam_size, totals.shape[1]), dim=-1)
    return _Candidates(scores, place // vocab_size, place % vocab_size)


def _gather(prefix: Tensor, source: Tensor) -> Tensor:
    """Return the prefixes [A, C, t] of the beams source [A, C]."""
    return prefix.gather(1, source[:, :, None].expand(-1, -1, prefix.shape[2]))


def _offer_completed(
    best: _Best,
    beams: _Beams,
    candidates: _Candidates,
    is_end: Tensor,
    beam_size: int,
    penalty: float,
) -> None:
    in_beam = candidates.scores[:, :beam_size]
    ended = in_beam.masked_fill(~is_end[:, :beam_size], -torch.inf)
    best.count(beams.sentences, ended / penalty)
    score, column = ended.max(-1, keepdim=True)
    prefix = _gather(beams.prefix, candidates.source.gather(1, column))
    best.offer(beams.sentences, prefix[:, 0], score[:, 0] / penalty)


def _choose_open(candidates: _Candidates, is_end: Tensor, beam_size: int) -> _Candidates:
    open_scores = candidates.scores.masked_fill(is_end, -torch.inf)
    scores, column = open_scores.topk(min(beam_size, open_scores.shape[1]), dim=-1)
    return _Candidates(
        scores, candidates.source.gather(1, column), candidates.token.gather(1, column)
    )


def _offer_survivors(
    best: _Best, beams: _Beams, chosen: _Candidates, length: int, length_penalty: float
) -> None:
    """Fall back to the best open hypothesis, of length tokens, where every continuation died."""
    stuck = (chosen.scores[:, 0] == -torch.inf) & (best.scores[beams.sentences] == -torch.inf)
    penalty = float(max(length, 1)) ** length_penalty
    survivors = beams.scores[:, 0].masked_fill(~stuck, -torch.inf)
    best.offer(beams.sentences, beams.prefix[:, 0], survivors / penalty)


def _keep_rows(decoder: StepDecoder, beams: _Beams, source: Tensor, can_win: Tensor) -> None:
    num_sentences, width = beams.scores.shape
    first_row = torch.arange(num_sentences, device=source.device)[:, None] * width
    index = (first_row + source)[can_win].flatten()
    same_sources = bool(can_win.all()) and source.shape[1] == width
    decoder.keep(index, same_sources=same_sources)
