"""Find the data files of an optional package without running its code."""

from importlib.util import find_spec
from pathlib import Path

from sparseformer.errors import ConfigError


def package_folder(package: str, source: str) -> Path:
    """Return the folder of an installed package; nothing of it is imported.

    Args:
        package: Name of the package, on PyPI and on the import path.
        source: The source that needs it, for the error.

    Raises:
        ConfigError: If it isn't installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f'The source {source} needs the package {package}: pip install "sparseformer[demo]"'
        )
    return Path(spec.submodule_search_locations[0])
