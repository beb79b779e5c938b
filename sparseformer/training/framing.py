"""What a model expects around the tokens of a text, and what it asks of its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparseformer.config import Config, DataConfig
from sparseformer.data import EncodedPairs, Pair, Tokenizer, encode_pairs
from sparseformer.errors import ConfigError
from sparseformer.generation import Constraints
from sparseformer.pretrained import PretrainedSettings


@dataclass(frozen=True, kw_only=True)
class Framing:
    """Tokens around a text, and limits of the outputs; the defaults are those of our own models.

    Every text ends with EOS; these tokens come on top of it.
    """

    before_source: tuple[int, ...] = ()
    after_source: tuple[int, ...] = ()
    """Behind EOS."""
    before_target: tuple[int, ...] = ()
    start_id: int | None = None
    """First input of the decoder; unset, the tokenizer's BOS."""
    forbidden_ids: tuple[int, ...] = ()
    """Rows of the embedding that stand for no token."""
    constraints: Constraints = field(default_factory=Constraints)


def make_framing(
    config: Config, tokenizer: Tokenizer, published: PretrainedSettings | None
) -> Framing:
    """Return the framing of a model of ours, or of the published checkpoint that it comes from.

        T5, mT5, Marian, Pegasus   text EOS            -> text EOS
        BART                       <s> text EOS        -> <s> text EOS
        mBART-50                   source text EOS     -> target text EOS
        mBART-cc25, -en-ro         text EOS source     -> text EOS, after the target's token

    where source and target are language tokens. Forced and suppressed tokens of outputs are the
    checkpoint's own; its shortest length isn't taken, since it belongs to the data of its last
    training.

    Raises:
        ConfigError: a language is missing, unknown to the tokenizer, or of no use.
    """
    if published is None or published.family != "mbart":
        _refuse_languages(config.data)
    if published is None:
        return Framing()
    framing = _frame(config.data, tokenizer, published)
    _check_lengths(config.data, framing)
    return framing


def encode_split(
    pairs: Sequence[Pair], tokenizer: Tokenizer, data: DataConfig, framing: Framing
) -> EncodedPairs:
    """Encode pairs with prefix and frame, within the lengths of a run's settings."""
    before, after, start = framing.before_source, framing.after_source, framing.before_target
    encoded = encode_pairs(
        pairs,
        tokenizer,
        data.max_source_length - len(before) - len(after),
        data.max_target_length - len(start),
        data.source_prefix,
    )
    return EncodedPairs(
        [[*before, *row, *after] for row in encoded.src],
        [[*start, *row] for row in encoded.tgt],
        encoded.truncated_src,
        encoded.truncated_tgt,
    )


def settle_start(tokenizer: Tokenizer, framing: Framing) -> None:
    """Let outputs start with the token that the checkpoint's decoder starts with."""
    if framing.start_id is not None:
        tokenizer.bos_id = framing.start_id


def _frame(data: DataConfig, tokenizer: Tokenizer, published: PretrainedSettings) -> Framing:
    asked = published.generation
    forced_bos, start_id = asked.forced_bos_id, published.start_id
    before_source: tuple[int, ...] = ()
    after_source: tuple[int, ...] = ()
    before_target: tuple[int, ...] = ()
    if published.family == "bart":
        first = tokenizer.token_id("<s>")
        before_source = before_target = () if first is None else (first,)
    if published.family == "mbart":
        source = _language(data.source_lang, "source_lang", tokenizer)
        target = _language(data.target_lang, "target_lang", tokenizer)
        if start_id == published.eos_id:
            before_source, before_target = (source,), (target,)
            forced_bos = target
        else:
            after_source, start_id, forced_bos = (source,), target, None
    return Framing(
        before_source=before_source,
        after_source=after_source,
        before_target=before_target,
        start_id=start_id,
        forbidden_ids=tuple(range(tokenizer.vocab_size, published.vocab_size)),
        constraints=Constraints(
            forced_bos_id=forced_bos,
            forced_eos_id=asked.forced_eos_id,
            suppressed_ids=asked.suppressed_ids,
        ),
    )


def _language(name: str | None, option: str, tokenizer: Tokenizer) -> int:
    if name is None:
        raise ConfigError(
            f"An mBART checkpoint marks languages, so set data.{option}, such as en_XX or de_DE."
        )
    token_id = tokenizer.token_id(name)
    if token_id is None:
        raise ConfigError(
            f"data.{option} is {name!r}, but the tokenizer has no such token; mBART's look like "
            "en_XX and de_DE."
        )
    return token_id


def _refuse_languages(data: DataConfig) -> None:
    for option in ("source_lang", "target_lang"):
        if getattr(data, option) is not None:
            raise ConfigError(
                f"data.{option} is for mBART checkpoints, and this model isn't one; leave it out, "
                'or put the language into the text, such as --data.source-prefix ">>de<< ".'
            )


def _check_lengths(data: DataConfig, framing: Framing) -> None:
    frames = {
        "max_source_length": len(framing.before_source) + len(framing.after_source),
        "max_target_length": len(framing.before_target),
    }
    for name, extra in frames.items():
        if getattr(data, name) < 2 + extra:
            raise ConfigError(
                f"data.{name} is {getattr(data, name)}, but it must be {2 + extra} or more: "
                "a token, EOS and what the checkpoint puts around a text."
            )
