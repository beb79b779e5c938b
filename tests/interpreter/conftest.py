"""Every test here runs Triton kernels on the CPU, in Triton's interpreter."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail at once, with the command, where the interpreter is off."""
    if items and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "tests/interpreter needs Triton's interpreter: TRITON_INTERPRET=1 pytest "
            "tests/interpreter, or python tests/run.py interpreter."
        )
