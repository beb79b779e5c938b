"""Scores of predicted texts: exact match, ROUGE, BLEU, chrF, PER and WER, in percent."""

import difflib
import re
import unicodedata
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, get_args

from sparseformer.config import MetricName

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

METRIC_NAMES: tuple[MetricName, ...] = get_args(MetricName)
ROUGE_NAMES: tuple[MetricName, ...] = ("rouge1", "rouge2", "rougeL", "rougeLsum")

# Wide full stops aren't followed by a space; the others are, or they belong to a number or a name.
_SENTENCE_END = re.compile(r"(?<=[.!?\u2026])\s+|(?<=[\u3002\uff01\uff1f])\s*")


def compute_metrics(
    predictions: Sequence[str], references: Sequence[str], names: Sequence[MetricName]
) -> dict[str, float]:
    """Score predictions against one reference each.

    | name | meaning, in percent |
    |---|---|
    | exact_match | share of predictions that equal their reference, character by character |
    | rouge1, rouge2, rougeL, rougeLsum | mean F-measure (Lin 2004); Lsum over sentences |
    | bleu, chrf | sacrebleu's corpus scores with its default settings (Post 2018) |
    | per | edit operations between symbols per reference symbol, see phone_error_rate |
    | wer | the same between words |

    per and wer are lower for better predictions, and they pass 100 when more symbols are inserted
    than the references hold.

    Args:
        predictions: Generated texts.
        references: Texts that were expected, in the same order.
        names: Which scores to compute.

    Returns:
        The value of each name, in the order of names.

    Raises:
        ValueError: If a name is unknown, or the lists are empty or of different lengths.
    """
    for name in names:
        _check_name(name)
    _check_texts(predictions, references)
    rouge = rouge_scores(predictions, references, [name for name in names if name in ROUGE_NAMES])
    own: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
        "exact_match": exact_match,
        "bleu": bleu,
        "chrf": chrf,
        "per": phone_error_rate,
        "wer": word_error_rate,
    }
    return {
        name: rouge[name] if name in rouge else own[name](predictions, references) for name in names
    }


def metric_signatures(names: Sequence[MetricName]) -> dict[str, str]:
    """Return the settings of the scores that papers quote with a signature (Post 2018).

    Args:
        names: As in compute_metrics; only bleu, chrf and the ROUGE names have one.

    Returns:
        One line per name, such as "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0".

    Raises:
        ValueError: If a name is unknown.
    """
    for name in names:
        _check_name(name)
    signatures: dict[str, str] = {}
    for name in names:
        if name in ROUGE_NAMES:
            signatures[name] = _rouge_signature()
        elif name in ("bleu", "chrf"):
            metric = _sacrebleu_metric(name)
            metric.corpus_score(["-"], [["-"]])  # a signature holds the number of references
            signatures[name] = str(metric.get_signature())
    return signatures


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the percentage of predictions that equal their reference."""
    hits = sum(p == r for p, r in zip(predictions, references, strict=True))
    return 100.0 * hits / len(references)


class UnicodeTokenizer:
    """Lower-cased runs of letters, digits and combining marks of any script, without stemming.

    On ASCII it agrees with rouge_score's default tokenizer, which drops all other letters.
    """

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text; Chinese, Japanese and Thai runs stay whole."""
        runs = groupby(unicodedata.normalize("NFC", text).lower(), key=_is_word_character)
        return ["".join(characters) for is_word, characters in runs if is_word]


def _is_word_character(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character).startswith("M")


def split_sentences(text: str) -> str:
    """Put every sentence on a line of its own, as rougeLsum expects; line breaks stay."""
    return _SENTENCE_END.sub("\n", text)


def rouge_scores(
    predictions: Sequence[str], references: Sequence[str], names: Sequence[MetricName]
) -> dict[str, float]:
    """Return the mean F-measures of rouge_score, in percent, with Unicode words."""
    if not names:
        return {}
    from rouge_score.rouge_scorer import RougeScorer

    others = [name for name in names if name != "rougeLsum"]
    totals = dict.fromkeys(names, 0.0)
    scorer = RougeScorer(others, tokenizer=UnicodeTokenizer())
    sentence_scorer = RougeScorer(["rougeLsum"], tokenizer=UnicodeTokenizer())
    for prediction, reference in zip(predictions, references, strict=True):
        scores = scorer.score(reference, prediction)
        if "rougeLsum" in totals:
            sentences = split_sentences(reference), split_sentences(prediction)
            scores |= sentence_scorer.score(*sentences)
        for name in totals:
            totals[name] += scores[name].fmeasure
    return {name: 100.0 * total / len(references) for name, total in totals.items()}


def _rouge_signature() -> str:
    from importlib.metadata import version

    return f"nrefs:1|case:lc|stem:no|tok:unicode|rouge_score:{version('rouge-score')}"


def bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return sacrebleu's corpus BLEU (Papineni et al. 2002; 13a tokens, mixed case)."""
    return float(_sacrebleu_metric("bleu").corpus_score(predictions, [references]).score)


def chrf(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return sacrebleu's corpus chrF2 (Popovic 2015; characters up to 6-grams, no words)."""
    return float(_sacrebleu_metric("chrf").corpus_score(predictions, [references]).score)


def _sacrebleu_metric(name: str) -> "Metric":
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return BLEU() if name == "bleu" else CHRF()


def phone_error_rate(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the error rate over symbols.

    Symbols are what white space separates when half of the references or more hold white space
    ("HH AH0 L OW1"); else they are characters, spaces among them ("took off").
    """
    spaced = sum(any(character.isspace() for character in text) for text in references)
    if 2 * spaced >= len(references):
        return word_error_rate(predictions, references)
    return error_rate([list(text) for text in predictions], [list(text) for text in references])


def word_error_rate(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the error rate over words, as in speech recognition.

    The word error rate of papers on pronunciation, which is the share of words with any wrong
    phone, is 100 - exact_match here.
    """
    return error_rate([text.split() for text in predictions], [text.split() for text in references])


def error_rate(
    predictions: Sequence[Sequence[Hashable]], references: Sequence[Sequence[Hashable]]
) -> float:
    """Return 100 * edit operations / reference symbols, summed over all pairs before dividing.

    References without any symbol count as one symbol in all, so that anything but empty
    predictions is an error.
    """
    pairs = zip(predictions, references, strict=True)
    edits = sum(edit_distance(prediction, reference) for prediction, reference in pairs)
    return 100.0 * edits / max(sum(map(len, references)), 1)


def edit_distance(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """Count the insertions, deletions and substitutions that turn left into right.

    A whole column of the dynamic program is one Python integer: bit i says whether the distance
    rises (rises) or falls (falls) from row i to i + 1, so a symbol costs a few integer operations.
    Source: Myers 1999, "A fast bit-vector algorithm for approximate string matching"; Hyyro 2003.
    """
    if not left:
        return len(right)
    matches: dict[Hashable, int] = {}
    for row, symbol in enumerate(left):
        matches[symbol] = matches.get(symbol, 0) | 1 << row
    all_rows, last_row = (1 << len(left)) - 1, 1 << (len(left) - 1)
    rises, falls, distance = all_rows, 0, len(left)
    for symbol in right:
        equal = matches.get(symbol, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        right_rises = falls | ~(diagonal | rises)
        right_falls = rises & diagonal
        distance += bool(right_rises & last_row) - bool(right_falls & last_row)
        right_rises = (right_rises << 1) | 1
        rises = ((right_falls << 1) | ~(equal | falls | right_rises)) & all_rows
        falls = right_rises & (equal | falls) & all_rows
    return distance


def _check_name(name: str) -> None:
    if name in METRIC_NAMES:
        return
    near = difflib.get_close_matches(name, METRIC_NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(METRIC_NAMES)}."
    raise ValueError(f"{name!r} is not a metric; {hint}")


def _check_texts(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references):
        raise ValueError(
            f"There are {len(predictions)} predictions for {len(references)} references; "
            "pass one prediction per reference."
        )
    if not references:
        raise ValueError("There are no predictions to score; pass at least one pair of texts.")
