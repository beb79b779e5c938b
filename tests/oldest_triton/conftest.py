"""Every test here compiles kernels with the oldest Triton that is supported."""

import pytest
import triton

OLDEST = "3.6.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail at once, with the command, under another version."""
    if items and triton.__version__ != OLDEST:
        raise pytest.UsageError(
            f"tests/oldest_triton needs triton {OLDEST} and found {triton.__version__}; "
            "python tests/run.py 'oldest triton' installs it under build/ and runs these tests."
        )
