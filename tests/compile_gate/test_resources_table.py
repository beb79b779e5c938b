"""docs/kernel_resources.json tells of the kernels as they are, on every GPU, without spills."""

from pathlib import Path
from typing import Any

import pytest
from gate import TABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return every shipped configuration, by its name in the table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import kernel_resources

    return {
        f"{room}/{x.case.name}": x
        for room in kernel_resources.ROOMS
        for x in kernel_resources.shipped_cases(room)
    }


def test_has_every_shipped_configuration_and_no_other(shipped: dict[str, Any]) -> None:
    assert list(TABLE) == list(shipped)


def test_was_compiled_from_the_kernels_as_they_are(shipped: dict[str, Any]) -> None:
    from kernel_sources import fingerprint

    stale = [name for name, x in shipped.items() if TABLE[name]["source"] != fingerprint(x.case)]
    assert not stale, (
        "run python benchmarks/kernel_resources.py --jobs 2, and commit what it writes"
    )


def test_shows_no_spills_on_any_gpu(shipped: dict[str, Any]) -> None:
    spilled = {
        (name, arch): TABLE[name][str(arch)]["spilled"]
        for name, x in shipped.items()
        for arch in x.architectures
    }
    assert not [where for where, size in spilled.items() if size]


def test_a_fingerprint_tells_a_change_of_what_a_kernel_calls(
    shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_sources import fingerprint

    from sparseformer.kernels.entmax_attention import powers

    case = shipped["entmax_attention/forward output bf16 D=64 eps=None"].case
    before = fingerprint(case)
    monkeypatch.setattr(powers, "quick_log2", powers.learned_alpha_term)
    assert fingerprint(case) != before
