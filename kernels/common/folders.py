"""Where kernels keep what they have built or measured."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/sparseformer, else ~/.cache/sparseformer; it may not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparseformer"
