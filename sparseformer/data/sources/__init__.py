"""Sources of text pairs, one module each, and the function that loads the one a run asks for."""

from collections.abc import Mapping
from dataclasses import replace

from sparseformer.config import DataConfig, SourceName
from sparseformer.data.pairs import PairDataset, content_hash
from sparseformer.data.sources.copy import load_copy
from sparseformer.data.sources.debian import load_debian
from sparseformer.data.sources.docstrings import load_docstrings
from sparseformer.data.sources.files import load_files
from sparseformer.data.sources.g2p import load_g2p
from sparseformer.data.sources.hub import load_hub
from sparseformer.data.sources.inflection import load_inflection
from sparseformer.errors import ConfigError

# Option -> the sources that read it; another source would ignore it in silence.
_OPTIONS: Mapping[str, tuple[SourceName, ...]] = {
    "train_file": ("files",),
    "validation_file": ("files",),
    "test_file": ("files",),
    "train_target_file": ("files",),
    "validation_target_file": ("files",),
    "test_target_file": ("files",),
    "source_column": ("files", "hub"),
    "target_column": ("files", "hub"),
    "hub_name": ("hub",),
    "hub_config": ("hub",),
    "hub_revision": ("hub",),
    "translate": ("debian",),
}


def load_dataset(config: DataConfig, seed: int) -> PairDataset:
    """Load the pairs that a run trains and is scored on.

    Args:
        config: The source and its options; max_train_rows and max_eval_rows keep the first rows of
            each split.
        seed: Seed of the run; only the generated source `copy` depends on it.

    Returns:
        Three splits without a shared input, as far as the source doesn't bring its own splits.

    Raises:
        ConfigError: If an option belongs to another source, is missing, or needs an extra.
        DataError: If a file, a column or too many rows can't be used.
    """
    for option, sources in _OPTIONS.items():
        if getattr(config, option) is not None and config.source not in sources:
            raise ConfigError(
                f"data.{option} is for the source {' or '.join(sources)}, but data.source is "
                f"{config.source}: change one of the two."
            )
    return _first_rows(_load(config, seed), config)


def _load(config: DataConfig, seed: int) -> PairDataset:
    match config.source:
        case "inflection":
            return load_inflection()
        case "docstrings":
            return load_docstrings(config)
        case "g2p":
            return load_g2p()
        case "debian":
            return load_debian(config)
        case "files":
            return load_files(config)
        case "hub":
            return load_hub(config)
        case "copy":
            return load_copy(seed)


def _first_rows(dataset: PairDataset, config: DataConfig) -> PairDataset:
    if config.max_train_rows is None and config.max_eval_rows is None:
        return dataset
    train = dataset.train[: config.max_train_rows]
    validation = dataset.validation[: config.max_eval_rows]
    test = dataset.test[: config.max_eval_rows]
    return replace(
        dataset,
        train=train,
        validation=validation,
        test=test,
        content_hash=content_hash(train, validation, test),
    )
