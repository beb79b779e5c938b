"""A pytest plugin under which `import entmax` gives this project's compat package.

The private helpers that one test file imports are stand-ins which fail when called, so that the
other tests of that file run.
"""

import sys
from typing import NoReturn

import torch

from sparseformer.compat import entmax
from sparseformer.compat.entmax import activations, losses, root_finding

PRIVATE = ("_sparsemax_threshold_and_support", "_entmax_threshold_and_support")


def pytest_configure() -> None:
    """Put our modules where theirs would be looked for, and seed their random inputs."""
    modules = {"activations": activations, "losses": losses, "root_finding": root_finding}
    sys.modules["entmax"] = entmax
    for name, module in modules.items():
        sys.modules[f"entmax.{name}"] = module
    for name in PRIVATE:
        setattr(activations, name, _no_private_name)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def _no_private_name(*_arguments: object, **_options: object) -> NoReturn:
    raise AssertionError("a private name, which compat doesn't have")
