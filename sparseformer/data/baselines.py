"""Predictions without a network, which a trained model has to beat."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from sparseformer.data.pairs import Pair, PairDataset

# Letters of context before the change; of 0 to 8 the best on the validation lemmas.
CONTEXT = 4

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")

# (tag, end of the lemma) -> (what goes, what comes).
Rules = Mapping[tuple[str, str], tuple[str, str]]


def baseline_predictions(dataset: PairDataset) -> list[str] | None:
    """Predict the test split with the data set's baseline.

    suffix_rule learns from the training split, per tag, how word ends change. lead_1 takes the
    first sentence.

    Returns:
        One text per test pair, or None if the data set has no baseline.
    """
    if dataset.baseline == "suffix_rule":
        rules = learn_suffix_rules(dataset.train)
        return [apply_suffix_rules(rules, pair.src) for pair in dataset.test]
    if dataset.baseline == "lead_1":
        return [first_sentence(pair.src) for pair in dataset.test]
    return None


def first_sentence(text: str) -> str:
    """Return the text up to the first `.`, `!` or `?` before white space, else all of it."""
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def learn_suffix_rules(pairs: Iterable[Pair]) -> Rules:
    """Learn the most frequent rewrite of every lemma ending, per tag.

    `carry[VBD]` -> `carried` teaches y -> ied after "", "r", "rr" and "arr".

    Args:
        pairs: Inputs `lemma[TAG]`, outputs the inflected form.
    """
    counts: defaultdict[tuple[str, str], Counter[tuple[str, str]]] = defaultdict(Counter)
    for src, form in pairs:
        lemma, tag = _lemma_and_tag(src)
        start = _common_prefix(lemma, form)
        for begin in range(max(0, start - CONTEXT), start + 1):
            counts[tag, lemma[begin:]][lemma[start:], form[start:]] += 1
    # most_common keeps the order of first occurrence among equals, so the result is reproducible.
    return {key: rewrites.most_common(1)[0][0] for key, rewrites in counts.items()}


def apply_suffix_rules(rules: Rules, src: str) -> str:
    """Inflect `lemma[TAG]` by the rule of its longest known ending, if there is one."""
    lemma, tag = _lemma_and_tag(src)
    for begin in range(len(lemma) + 1):
        if (rule := rules.get((tag, lemma[begin:]))) is not None:
            old, new = rule
            return lemma.removesuffix(old) + new
    return lemma


def _lemma_and_tag(src: str) -> tuple[str, str]:
    lemma, _, tag = src.rpartition("[")
    return lemma, tag


def _common_prefix(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
