"""Settings of the search for outputs."""

from dataclasses import dataclass

from sparseformer.config.checks import require, require_at_least
from sparseformer.config.choices import StrategyName


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How outputs are searched for, in evaluation during training and at the end alike."""

    strategy: StrategyName = "greedy"
    beam_size: int = 4
    length_penalty: float = 1.0
    """beam: hypotheses are ranked by log-probability / length ** length_penalty."""
    no_repeat_ngram: int = 0
    """Never produce an n-gram of this length twice; 0 allows it."""
    temperature: float = 1.0
    """sample: logits are divided by this."""
    top_k: int = 0
    """sample: draw among this many most likely tokens; 0 means all."""
    top_p: float = 1.0
    """sample: draw among the most likely tokens that hold this share of the probability."""
    max_length: int | None = None
    """Longest output, EOS included; unset, data.max_target_length."""
    batch_tokens: int = 8192
    """Padded source tokens of one evaluation batch, times the beam size."""

    def __post_init__(self) -> None:
        require_at_least("generation", self, 1, "beam_size", "max_length", "batch_tokens")
        require_at_least("generation", self, 0, "no_repeat_ngram", "top_k", "length_penalty")
        temperature = self.temperature
        require(0.01 <= temperature <= 100, "generation.temperature", temperature, "in [0.01, 100]")
        require(0.0 < self.top_p <= 1.0, "generation.top_p", self.top_p, "in (0, 1]")
