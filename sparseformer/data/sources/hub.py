"""Pairs from the Hugging Face hub or from a local folder, through the `datasets` library."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparseformer.config import DataConfig
from sparseformer.data.pairs import PairDataset
from sparseformer.data.sources.columns import Collected, collect_pairs
from sparseformer.data.sources.files import assemble
from sparseformer.data.sources.readers import Row
from sparseformer.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets

_VALIDATION_NAMES = ("validation", "valid", "dev", "val")


def load_hub(config: DataConfig) -> PairDataset:
    """Load data.hub_name with `datasets.load_dataset`.

    Splits that the data set lacks are held out from its training split. The library guesses types
    of local CSV and JSON files: a value that it turned into something else than text is left out
    and counted; the source `files` reads such files without guessing.

    Raises:
        ConfigError: If data.hub_name isn't set.
        DataError: If the data set, a split, a column or too many rows can't be used.
    """
    if config.hub_name is None:
        raise ConfigError(
            "The source hub needs data.hub_name: a data set's name, or a local folder."
        )
    name = config.hub_name
    found = _fetch(name, config)
    if "train" not in found:
        raise DataError(
            f"{name} has no split train, only {', '.join(found)}: choose another data set."
        )
    train = _collect(found["train"], f"{name}[train]", config)
    validation, test = (
        next((_collect(found[s], f"{name}[{s}]", config) for s in names if s in found), None)
        for names in (_VALIDATION_NAMES, ("test",))
    )
    return assemble(f"hub {name}", train, validation, test)


def _fetch(name: str, config: DataConfig) -> "Mapping[str, datasets.Dataset]":
    import datasets

    try:
        found = datasets.load_dataset(
            name,
            config.hub_config,
            revision=config.hub_revision,
            cache_dir=config.cache_dir and str(Path(config.cache_dir) / "hub"),
        )
    # OSError covers a missing network, file and data set; ValueError a wrong configuration;
    # RuntimeError a data set that is a script; DatasetsError a damaged file.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"The data set {name} can't be loaded ({reason}): check data.hub_name, data.hub_config "
            "and the network, or give a local folder as data.hub_name."
        ) from error
    splits: Mapping[str, datasets.Dataset] = found
    return splits


def _collect(split: "datasets.Dataset", origin: str, config: DataConfig) -> Collected:
    rows = [Row(number, columns) for number, columns in enumerate(split, 1)]
    if not rows:
        raise DataError(f"There are no rows in {origin}: choose another data set.")
    return collect_pairs(rows, origin, config)
