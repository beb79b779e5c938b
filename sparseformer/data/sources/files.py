"""Pairs from the user's own files: JSONL, CSV, TSV, parquet, or two text files in parallel."""

from pathlib import Path

from sparseformer.config import DataConfig
from sparseformer.data.pairs import (
    TEST_PERCENT,
    VALIDATION_PERCENT,
    PairDataset,
    Splits,
    hold_out,
    make_dataset,
    merge_rejections,
)
from sparseformer.data.sources.columns import Collected, collect_pairs
from sparseformer.data.sources.readers import TABLE_SUFFIXES, read_parallel, read_rows
from sparseformer.errors import ConfigError


def load_files(config: DataConfig) -> PairDataset:
    """Load data.train_file, and validation_file and test_file where they are given.

    Of a split without a file, 5 % of the distinct training inputs are held out by a hash of their
    text.

    Raises:
        ConfigError: If data.train_file isn't set, or options don't go together.
        DataError: If a file, a column or too many rows can't be used.
    """
    if config.train_file is None:
        raise ConfigError(
            "The source files needs data.train_file: a JSONL, CSV, TSV, parquet or text file."
        )
    _check_parallel(config)
    train = _load(config.train_file, config.train_target_file, config)
    validation, test = (
        None if file is None else _load(file, target_file, config)
        for file, target_file in (
            (config.validation_file, config.validation_target_file),
            (config.test_file, config.test_target_file),
        )
    )
    return assemble("files", train, validation, test)


def assemble(
    name: str, train: Collected, validation: Collected | None, test: Collected | None
) -> PairDataset:
    """Make a data set of what was collected; a missing split is held out from the training pairs.

    Raises:
        DataError: If there are too few distinct inputs to hold any out.
    """
    rejected = merge_rejections(*(part.rejected for part in (train, validation, test) if part))
    train_pairs = train.pairs
    if test is None:
        train_pairs, test_pairs = hold_out(train_pairs, TEST_PERCENT, "test")
    else:
        test_pairs = test.pairs
    if validation is None:
        train_pairs, validation_pairs = hold_out(train_pairs, VALIDATION_PERCENT, "validation")
    else:
        validation_pairs = validation.pairs
    return make_dataset(name, Splits(train_pairs, validation_pairs, test_pairs), rejected=rejected)


def _check_parallel(config: DataConfig) -> None:
    """Refuse options of parallel text that would be ignored or read as something else."""
    has_table = False
    for split in ("train", "validation", "test"):
        file_option, target_option = f"{split}_file", f"{split}_target_file"
        file, target_file = getattr(config, file_option), getattr(config, target_option)
        has_table |= file is not None and target_file is None
        if target_file is None:
            continue
        if file is None:
            raise ConfigError(
                f"data.{target_option} needs data.{file_option}, the other side of its pairs: set "
                "both or neither."
            )
        for option, name in ((file_option, file), (target_option, target_file)):
            if Path(name).suffix.lower() in TABLE_SUFFIXES:
                raise ConfigError(
                    f"data.{option} is the table {name}, but parallel text wants two plain text "
                    f"files: leave out data.{target_option}, or give text files."
                )
    for option in ("source_column", "target_column"):
        if getattr(config, option) is not None and not has_table:
            raise ConfigError(
                f"data.{option} chooses a column of a table, but parallel text has none: leave it "
                "out."
            )


def _load(file: str, target_file: str | None, config: DataConfig) -> Collected:
    path = Path(file)
    if target_file is None:
        return collect_pairs(read_rows(path), path.name, config)
    # Parallel text has no columns to choose from.
    chosen = DataConfig(
        source_column="source", target_column="target", max_bad_share=config.max_bad_share
    )
    return collect_pairs(read_parallel(path, Path(target_file)), path.name, chosen)
