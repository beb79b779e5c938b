"""Token ids of one split: cut to length with the end token kept, and cuts counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparseformer.data.pairs import Pair
from sparseformer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedPairs:
    """Token ids of one split, EOS at the end of both sides, also after a cut."""

    src: list[list[int]]
    tgt: list[list[int]]
    truncated_src: int
    """Rows whose input was cut."""
    truncated_tgt: int
    """Rows whose output was cut."""


def encode_pairs(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    max_source_length: int,
    max_target_length: int,
    source_prefix: str = "",
) -> EncodedPairs:
    """Encode pairs; a row longer than its limit loses its tail, never its EOS.

    Args:
        pairs: Texts, in the order of the rows.
        tokenizer: Gives the ids.
        max_source_length: Tokens of the input, EOS included, 2 or more.
        max_target_length: Tokens of the output, EOS included, 2 or more.
        source_prefix: Text put before every input.

    Returns:
        One row of ids per pair, and how many rows of each side were cut.

    Raises:
        ValueError: If a limit is below 2.
    """
    rows = list(pairs)
    eos = tokenizer.eos_id
    src = tokenizer.encode_batch([source_prefix + pair.src for pair in rows])
    tgt = tokenizer.encode_batch([pair.tgt for pair in rows])
    src_rows, truncated_src = _end(src, eos, max_source_length)
    tgt_rows, truncated_tgt = _end(tgt, eos, max_target_length)
    return EncodedPairs(src_rows, tgt_rows, truncated_src, truncated_tgt)


def _end(rows: Sequence[list[int]], eos: int, limit: int) -> tuple[list[list[int]], int]:
    """Cut rows to limit - 1 tokens and append EOS; return them and how many were cut."""
    if limit < 2:
        raise ValueError(
            f"The length limit is {limit}, but it must be 2 or more: one token and EOS."
        )
    truncated = sum(len(row) >= limit for row in rows)
    return [[*row[: limit - 1], eos] for row in rows], truncated
