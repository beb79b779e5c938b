"""How a published checkpoint wants its outputs searched for."""

from dataclasses import dataclass

from sparseformer.config import GenerationConfig
from sparseformer.generation import Constraints
from sparseformer.generation.rules import BeamStopping
from sparseformer.pretrained.settings_file import SettingsFile

# What transformers fills in where neither file says anything.
_MAX_LENGTH = 20


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults(Constraints):
    """The search that a checkpoint's files describe; pass it to `generate` as its constraints."""

    num_beams: int = 1
    max_length: int = _MAX_LENGTH - 1
    """Longest output in tokens, EOS included; the files also count the start token."""
    length_penalty: float = 1.0
    no_repeat_ngram: int = 0

    def config(self) -> GenerationConfig:
        """Return the search as our settings: greedy with one beam, else a beam search."""
        return GenerationConfig(
            strategy="greedy" if self.num_beams == 1 else "beam",
            beam_size=self.num_beams,
            length_penalty=self.length_penalty,
            no_repeat_ngram=self.no_repeat_ngram,
            max_length=self.max_length,
        )


def read_generation(settings: SettingsFile, forced_eos: int | None) -> GenerationDefaults:
    """Read generation_config.json, or config.json where it doesn't exist.

    Args:
        settings: The file.
        forced_eos: What the family fills in where the file is silent.

    Raises:
        CheckpointError: A value can't be used.
    """
    is_silent = "forced_eos_token_id" not in settings.values
    return GenerationDefaults(
        forced_bos_id=settings.token("forced_bos_token_id"),
        forced_eos_id=forced_eos if is_silent else settings.token("forced_eos_token_id"),
        suppressed_ids=_suppressed_ids(settings),
        min_length=_min_length(settings),
        num_beams=settings.integer("num_beams", 1, minimum=1),
        max_length=_max_length(settings),
        length_penalty=settings.number("length_penalty", 1.0),
        no_repeat_ngram=settings.integer("no_repeat_ngram_size", 0),
        beam_stopping=_beam_stopping(settings),
    )


def _max_length(settings: SettingsFile) -> int:
    with_start = settings.integer("max_length", _MAX_LENGTH, minimum=2)
    return settings.integer("max_new_tokens", with_start - 1, minimum=1)


def _min_length(settings: SettingsFile) -> int:
    """Return the fewest tokens with EOS: `min_length` counts the start token, but not EOS."""
    fewest = settings.integer("min_length", 0)
    without_eos = settings.values.get("min_new_tokens")
    return fewest if without_eos is None else settings.integer("min_new_tokens") + 1


def _beam_stopping(settings: SettingsFile) -> BeamStopping:
    value = settings.values.get("early_stopping")
    if value == "never":
        return "exact"
    if value is not None and not isinstance(value, bool):
        raise settings.refusal("early_stopping", "true, false or never")
    return "full" if value else "heuristic"


def _suppressed_ids(settings: SettingsFile) -> tuple[int, ...]:
    words = settings.values.get("bad_words_ids") or []
    suppressed = settings.values.get("suppress_tokens") or []
    single = isinstance(words, list) and all(isinstance(w, list) and len(w) == 1 for w in words)
    if not single:
        raise settings.refusal("bad_words_ids", "a list of lists of one token id")
    if not isinstance(suppressed, list):
        raise settings.refusal("suppress_tokens", "a list of token ids")
    ids = [word[0] for word in words] + suppressed
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise settings.refusal("bad_words_ids", "made of token ids")
    return tuple(sorted(set(ids)))
