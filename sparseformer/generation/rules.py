"""Which tokens may follow a prefix, and with what log-probability."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparseformer.errors import NumericError

LogProbabilities = Callable[[Tensor], Tensor]
BeamStopping = Literal["exact", "full", "heuristic"]


class Hypothesis(NamedTuple):
    """One generated sequence, without BOS and EOS.

    score is the sum of the log-probabilities, of EOS too; beam search divides it by
    length ** length_penalty, where the length counts EOS.
    """

    ids: list[int]
    score: float


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities of a model that was trained with cross-entropy."""
    return torch.log_softmax(logits, dim=-1)


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a published checkpoint asks of its outputs, beside its scores.

    All of it acts on the normalised log-probabilities, as in transformers: nothing takes the place
    of a suppressed token, and a forced one costs nothing.
    """

    forced_bos_id: int | None = None
    """The first token of every output: `<s>` for BART, the language of the output for mBART."""
    forced_eos_id: int | None = None
    """The token of an output that reaches the longest length."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids that are never generated; Marian lists its padding here."""
    min_length: int = 0
    """Fewest tokens of an output, EOS included."""
    beam_stopping: BeamStopping = "exact"
    """When a beam search is done with a sentence. exact: nothing better can follow, however it goes
    on. full: it has beam_size complete hypotheses (`early_stopping: true` in transformers).
    heuristic: full, and no open hypothesis is better than the worst of them at the present length
    (`early_stopping: false`)."""


@dataclass(frozen=True, kw_only=True)
class SearchRules:
    """What every strategy obeys.

    Banned ids are left out before normalising: they are no part of the language, and a padded row
    of an embedding must take no probability. Repeated n-grams are left out after it: they are
    words that the model wants, so avoiding them has to cost a hypothesis what it costs.
    """

    bos_id: int
    eos_id: int
    banned_ids: tuple[int, ...]
    max_length: int
    no_repeat_ngram: int = 0
    log_probabilities: LogProbabilities = log_softmax
    constraints: Constraints = Constraints()

    def log_probs(self, logits: Tensor, prefix: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log-probabilities [rows, vocab_size] after prefix [rows, t]; -inf: not allowed."""
        self._check_ids(logits.shape[-1])
        banned = torch.tensor(self.banned_ids, dtype=torch.int64, device=logits.device)
        allowed = logits.index_fill(-1, banned, -torch.inf)
        log_probs = self.log_probabilities(allowed / temperature)
        generated = prefix[:, 1:]  # BOS may be EOS, which must stay allowed
        if 0 < self.no_repeat_ngram <= generated.shape[1]:
            repeats = repeated_ngrams(generated, self.no_repeat_ngram, logits.shape[-1])
            log_probs = log_probs.masked_fill(repeats, -torch.inf)
        return self._constrain(log_probs, prefix.shape[1])

    def _constrain(self, log_probs: Tensor, length: int) -> Tensor:
        """Apply the constraints to the log-probabilities of token number `length`, from 1."""
        asked = self.constraints
        out = list(asked.suppressed_ids)
        if length < asked.min_length:
            out.append(self.eos_id)
        if out:
            index = torch.tensor(out, dtype=torch.int64, device=log_probs.device)
            log_probs = log_probs.index_fill(-1, index, -torch.inf)
        forced = asked.forced_bos_id if length == 1 else None
        if length == self.max_length and asked.forced_eos_id is not None:
            forced = asked.forced_eos_id
        if forced is not None:
            log_probs = torch.full_like(log_probs, -torch.inf)
            log_probs[:, forced] = 0.0
        return log_probs

    def _check_ids(self, vocab_size: int) -> None:
        asked = self.constraints
        forced = [i for i in (asked.forced_bos_id, asked.forced_eos_id) if i is not None]
        wanted = {"left out": (*self.banned_ids, *asked.suppressed_ids), "forced": forced}
        for verb, ids in wanted.items():
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                raise ValueError(
                    f"Token {outside[0]} is to be {verb}, but the model has {vocab_size} tokens; "
                    f"pass ids from 0 to {vocab_size - 1}."
                )


def repeated_ngrams(prefix: Tensor, size: int, vocab_size: int) -> Tensor:
    """Mark the tokens that would end an n-gram which the prefix already holds.

    Args:
        prefix: int64 [rows, t], t at least size.
        size: Length of the n-grams, at least 1.
        vocab_size: Number of columns of the result.

    Returns:
        bool [rows, vocab_size].
    """
    ngrams = prefix.unfold(1, size, 1)  # [rows, t - size + 1, size]
    tail = prefix[:, prefix.shape[1] - size + 1 :]
    matches = (ngrams[:, :, :-1] == tail[:, None]).all(-1)
    counts = torch.zeros(len(prefix), vocab_size, dtype=torch.int32, device=prefix.device)
    # A sum, as the same last token may end an n-gram that matches and one that doesn't.
    return counts.scatter_add_(1, ngrams[:, :, -1], matches.int()) > 0


def require_numbers(scores: Tensor, length: int) -> None:
    """Raise when the chosen log-probabilities hold NaN, which a search would rank first."""
    if bool(scores.isnan().any()):
        raise NumericError(
            f"The model's scores of target token {length} are not numbers; "
            "check the weights for NaN, or start from an earlier checkpoint."
        )
