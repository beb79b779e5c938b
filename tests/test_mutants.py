"""Every mutant of tests/mutants.py still applies to the kernels as they are now."""

import ast

import pytest
from mutants import MUTANTS, ROOT, Mutant, mutate


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_applies_to_one_place_and_leaves_python(mutant: Mutant) -> None:
    ast.parse(mutate((ROOT / mutant.file).read_text(), mutant))
    for path in mutant.tests.split():
        assert (ROOT / path.split("::")[0]).exists(), path
