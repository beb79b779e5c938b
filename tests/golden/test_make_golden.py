"""entmax.json is what make_golden.py computes, and agrees with values printed elsewhere."""

import json

import make_golden
import pytest

FILE = json.loads(make_golden.PATH.read_text(encoding="utf-8"))
SAMPLE = [("published", 1.5, 2), ("pair", 3.0, 1), ("worked", 1.0, 1), ("excluded", 2.0, 2)]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case[0]}-{case[1]:g}")
def test_the_script_gives_the_stored_vector(case: tuple[str, float, int]) -> None:
    stored = FILE["vectors"][make_golden.CASES.index(case)]
    assert make_golden.make_case(*case) == stored


def test_there_are_40_vectors_with_names_of_their_own() -> None:
    assert len({vector["name"] for vector in FILE["vectors"]}) == 40
    assert len(make_golden.CASES) == len(FILE["vectors"])


@pytest.mark.parametrize("vector", FILE["vectors"], ids=lambda vector: vector["name"])
def test_stored_values_obey_the_identities(vector: make_golden.Vector) -> None:
    """Rows sum to 1, their slopes to 0, and the loss's gradient is p - q: none was put in."""
    one_hot = [float(j == vector["target"]) for j in range(len(vector["scores"]))]
    residual = [p - q for p, q in zip(vector["probs"], one_hot, strict=True)]
    assert sum(vector["probs"]) == pytest.approx(1.0, abs=1e-15)
    assert sum(vector["d_scores"]) == pytest.approx(0.0, abs=1e-14)
    assert vector["d_logits"] == pytest.approx(residual, abs=1e-15)
    assert vector["loss"] >= 0.0
    assert vector["d_loss_d_alpha"] <= 0.0


@pytest.mark.parametrize(
    "entry", FILE["published"], ids=lambda entry: f"{entry['scores']}-{entry['alpha']:g}"
)
def test_bisection_gives_the_printed_values(entry: dict) -> None:
    make_golden.mp.dps = make_golden.DIGITS
    scores, alpha = [make_golden.mpf(s) for s in entry["scores"]], make_golden.mpf(entry["alpha"])
    probs = [float(p) for p in make_golden.solve(scores, alpha)]
    assert probs == pytest.approx(entry["probs"], abs=entry["tolerance"])
    if "d_alpha" in entry:
        weights = entry["weights"]
        slope = make_golden.slope_in_alpha(
            lambda values, a: make_golden.mp.fdot(weights, make_golden.solve(values, a)),
            scores,
            alpha,
        )
        digits = 5e-5 if entry["tolerance"] == 5e-5 else 5e-7
        assert float(slope) == pytest.approx(entry["d_alpha"], abs=digits)
