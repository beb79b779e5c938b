"""Settings of the pairs and their batches."""

from dataclasses import dataclass
from pathlib import Path

from sparseformer.config.checks import require, require_at_least
from sparseformer.config.choices import SourceName, TokenizerKind


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs come from, how they become ids, and how ids become batches."""

    source: SourceName = "inflection"
    """Which pairs to train on; `sparseformer data SOURCE` builds one and prints its counts."""
    train_file: str | None = None
    """Source `files`: JSONL, CSV, TSV or parquet; or text, beside train_target_file."""
    validation_file: str | None = None
    """Source `files`: as train_file; without it, a part of the training rows is held out."""
    test_file: str | None = None
    """Source `files`: as train_file; without it, a part of the training rows is held out."""
    train_target_file: str | None = None
    """Source `files`, parallel text: the target side, line by line."""
    validation_target_file: str | None = None
    """Source `files`, parallel text: the target side of validation_file."""
    test_target_file: str | None = None
    """Source `files`, parallel text: the target side of test_file."""
    source_column: str | None = None
    """Sources `files` and `hub`: the column of the input text; else the first column."""
    target_column: str | None = None
    """Sources `files` and `hub`: the column of the output text; else the second column."""
    hub_name: str | None = None
    """Source `hub`: the data set's name on the Hugging Face hub, or a local folder of one."""
    hub_config: str | None = None
    """Source `hub`: the data set's configuration, such as iwslt2017-en-de."""
    hub_revision: str | None = None
    """Source `hub`: a branch, tag or commit."""
    translate: str | None = None
    """Source `debian`: a language code (de, fr, it ...) for translation in place of summaries."""
    cache_dir: str | None = None
    """Where built sources are kept; else $XDG_CACHE_HOME/sparseformer or ~/.cache/sparseformer."""
    source_prefix: str = ""
    """Text put before every input, such as "summarize: "."""
    source_lang: str | None = None
    """mBART checkpoints: the language token of the input, such as en_XX."""
    target_lang: str | None = None
    """mBART checkpoints: the language token of the output, such as de_DE."""
    tokenizer: TokenizerKind = "char"
    """What a token is: characters, words split at white space, or byte-level BPE."""
    tokenizer_file: str | None = None
    """A tokenizer.json to load in place of training one."""
    vocab_size: int = 8000
    """The largest vocabulary to train, special tokens included."""
    max_source_length: int = 48
    """Tokens of the input, EOS included; longer rows are cut and counted."""
    max_target_length: int = 48
    """Tokens of the output, EOS included; longer rows are cut and counted."""
    batch_tokens: int = 3072
    """Padded source plus target tokens of one micro-batch."""
    max_train_rows: int | None = None
    """Use the first rows of the training split only."""
    max_eval_rows: int | None = None
    """Use the first rows of the validation and test splits only."""
    max_bad_share: float = 0.05
    """Stop when more than this share of the rows can't be used."""

    def __post_init__(self) -> None:
        require_at_least("data", self, 1, "batch_tokens", "max_train_rows", "max_eval_rows")
        require_at_least("data", self, 2, "max_source_length", "max_target_length")
        require_at_least("data", self, 5, "vocab_size")
        require(
            0.0 <= self.max_bad_share <= 1.0, "data.max_bad_share", self.max_bad_share, "in [0, 1]"
        )

    @property
    def label(self) -> str:
        """A short name of the data, part of the default name of a run."""
        if self.source == "hub" and self.hub_name:
            return Path(self.hub_config or self.hub_name).name
        if self.source == "files" and self.train_file:
            return Path(self.train_file).stem
        return f"{self.source}-{self.translate}" if self.translate else self.source
