"""Write entmax.json: probabilities, losses and slopes to 60 digits, by bisection and differences.

Nothing here is shared with the package: the threshold comes from bisection of sum_j p_j = 1 in
mpmath, and every derivative from a central difference of that, not from a formula. Run it as

    python tests/golden/make_golden.py

It takes about a minute and gives the same file each time. Scores are multiples of 1/64, so
that float16, float32 and float64 hold them exactly; null stands for -inf.
"""

import json
import random
from pathlib import Path
from typing import TypedDict

from mpmath import mp, mpf

PATH = Path(__file__).with_name("entmax.json")
DIGITS = 60
# With 60 digits a step of 1e-12 leaves errors near 1e-24, in the difference and in the quotient.
STEP = mpf(10) ** -12
# No score may lie this close to the border of the support: a derivative of sparsemax jumps there.
CLEARANCE = mpf("1e-3")


class Vector(TypedDict):
    """One row of scores and everything known about it."""

    name: str
    scores: list[float | None]
    alpha: float
    weights: list[float]
    target: int
    probs: list[float]
    d_scores: list[float]
    d_alpha: float
    loss: float
    d_logits: list[float]
    d_loss_d_alpha: float


def solve(scores: list[mpf], alpha: mpf) -> list[mpf]:
    """Return p_j = max(1 + eps (s_j - t), 0) ** (1/eps), sum 1, by bisection on t."""
    eps, top = alpha - 1, max(scores)

    def at(t: mpf) -> list[mpf]:
        if eps == 0:
            return [mp.exp(s - t) for s in scores]
        factors = [1 + eps * (s - t) for s in scores]
        return [w ** (1 / eps) if w > 0 else mpf(0) for w in factors]

    n = mpf(len(scores))
    low, high = top, top + (mp.log(n) if eps == 0 else (n**eps - 1) / eps)
    for _ in range(int(DIGITS * 3.4)):
        middle = (low + high) / 2
        low, high = (middle, high) if mp.fsum(at(middle)) > 1 else (low, middle)
    return at(high)


def loss(scores: list[mpf], target: int, alpha: mpf) -> mpf:
    """Return <p, z> + H(p) - z_y with the Tsallis entropy H, Shannon's at alpha = 1."""
    probs = solve(scores, alpha)
    if alpha == 1:
        entropy = -mp.fsum(p * mp.log(p) for p in probs if p > 0)
    else:
        entropy = (1 - mp.fsum(p**alpha for p in probs)) / (alpha * (alpha - 1))
    return mp.fdot(probs, scores) + entropy - scores[target]


def make_vector(name: str, row: list[float | None], alpha: float, target: int) -> Vector:
    """Compute one vector; excluded scores get probability and slope 0."""
    kept = [j for j, score in enumerate(row) if score is not None]
    scores, place = [mpf(row[j]) for j in kept], kept.index(target)
    weights = [float((5 * j + 3) % 7 - 3) / 2 for j in range(len(row))]
    exact_alpha = mpf(alpha)
    probs = solve(scores, exact_alpha)
    check_clearance(name, scores, probs, exact_alpha)

    def weighted(values: list[mpf], a: mpf) -> mpf:
        return mp.fdot([mpf(weights[j]) for j in kept], solve(values, a))

    def value(values: list[mpf], a: mpf) -> mpf:
        return loss(values, place, a)

    return Vector(
        name=name,
        scores=row,
        alpha=alpha,
        weights=weights,
        target=target,
        probs=spread(probs, kept, len(row)),
        d_scores=spread(slopes(weighted, scores, exact_alpha), kept, len(row)),
        d_alpha=plain(slope_in_alpha(weighted, scores, exact_alpha)),
        loss=plain(value(scores, exact_alpha)),
        d_logits=spread(slopes(value, scores, exact_alpha), kept, len(row)),
        d_loss_d_alpha=plain(slope_in_alpha(value, scores, exact_alpha)),
    )


def slopes(function, scores: list[mpf], alpha: mpf) -> list[mpf]:
    """Return the central difference of function(scores, alpha) in each score."""
    found = []
    for j in range(len(scores)):
        up, down = list(scores), list(scores)
        up[j], down[j] = scores[j] + STEP, scores[j] - STEP
        found.append((function(up, alpha) - function(down, alpha)) / (2 * STEP))
    return found


def slope_in_alpha(function, scores: list[mpf], alpha: mpf) -> mpf:
    """Return the central difference of function(scores, alpha) in alpha."""
    return (function(scores, alpha + STEP) - function(scores, alpha - STEP)) / (2 * STEP)


def check_clearance(name: str, scores: list[mpf], probs: list[mpf], alpha: mpf) -> None:
    """Refuse a row with a score at the border of the support, t - 1/eps."""
    eps = alpha - 1
    if eps <= 0:
        return
    top = max(range(len(scores)), key=lambda j: scores[j])
    threshold = scores[top] - (probs[top] ** eps - 1) / eps
    distance = min(abs(s - (threshold - 1 / eps)) for s in scores)
    assert distance > CLEARANCE, f"{name} has a score {mp.nstr(distance, 3)} from the border"


def spread(values: list[mpf], kept: list[int], length: int) -> list[float]:
    """Put the values at their places in a row of zeros."""
    row = [0.0] * length
    for j, found in zip(kept, values, strict=True):
        row[j] = plain(found)
    return row


def plain(value: mpf) -> float:
    """Return the nearest float; what lies below 1e-20 is the error of a difference, and 0."""
    return float(value) if abs(value) > mpf("1e-20") else 0.0


def random_row(length: int, scale: float, seed: int) -> list[float | None]:
    """Return seeded normal scores, rounded to multiples of 1/64."""
    source = random.Random(seed)
    return [round(64 * scale * source.gauss(0.0, 1.0)) / 64 for _ in range(length)]


ROWS: dict[str, list[float | None]] = {
    "worked": [1.0, 0.5, 0.0, -1.0],
    "published": [-2.0, 0.0, 0.5],
    "published_1.33": [-1.0, 0.0, 0.5],
    "single": [3.0],
    "pair": [0.25, 0.0],
    "ties": [0.5, 0.5, -0.25, 0.5, -1.0],
    "constant": [0.75] * 7,
    "sure": [10.0, 0.0, -1.0, 2.0],
    "large": [1000.0, 999.5, 998.0, -1000.0],
    "excluded": [1.0, 0.5, 0.0, None, -1.0],
    "wide": random_row(16, 2.0, 1),
    "flat": random_row(17, 0.25, 2),
    "long": random_row(33, 1.0, 3),
}
# Row, alpha, target.
CASES: list[tuple[str, float, int]] = [
    *(("worked", alpha, 1) for alpha in (1.0, 1.0001, 1.05, 1.2, 1.333, 1.5, 1.9, 2.0)),
    *(("published", alpha, 2) for alpha in (1.0, 1.5, 2.0)),
    ("published_1.33", 1.33, 0),
    ("single", 1.0, 0),
    ("single", 1.7, 0),
    *(("pair", alpha, 1) for alpha in (1.25, 1.5, 2.0, 3.0)),
    *(("ties", alpha, 0) for alpha in (1.0, 1.4, 1.5, 2.0)),
    *(("constant", alpha, 3) for alpha in (1.1, 1.5, 2.0)),
    *(("sure", alpha, 3) for alpha in (1.0, 1.05, 1.5)),
    *(("large", alpha, 1) for alpha in (1.3, 1.5, 2.0)),
    *(("excluded", alpha, 2) for alpha in (1.0, 1.5, 2.0)),
    *(("wide", alpha, 4) for alpha in (1.0, 1.25, 1.75)),
    *(("flat", alpha, 16) for alpha in (1.001, 1.5)),
    ("long", 1.5, 32),
]
# Printed in the papers and in docs/math.md: scores, alpha, p, then weights and the slope of
# sum_j weights_j p_j in alpha where it is printed, and half of a unit of the last digit.
WORKED = {"scores": ROWS["worked"], "weights": [1.0, -2.0, 3.0, 0.5], "tolerance": 5e-10}
PAPER = {"scores": ROWS["published"], "tolerance": 5e-5}
PUBLISHED = [
    WORKED | {"alpha": 1.05, "probs": [0.488150851, 0.288743266, 0.168391741, 0.054714142]},
    WORKED | {"alpha": 1.2, "probs": [0.533875362, 0.292511616, 0.147586712, 0.026026310]},
    WORKED | {"alpha": 1.333, "probs": [0.576329743, 0.294841977, 0.124250118, 0.004578162]},
    WORKED | {"alpha": 1.5, "probs": [0.624197529, 0.291666667, 0.084135804, 0.0]},
    WORKED | {"alpha": 1.9, "probs": [0.732266828, 0.267733172, 0.0, 0.0]},
    WORKED | {"alpha": 2.0, "probs": [0.75, 0.25, 0.0, 0.0]},
    PAPER | {"alpha": 1.0, "probs": [0.0486, 0.3592, 0.5922]},
    PAPER | {"alpha": 1.5, "probs": [0.0, 0.3260, 0.6740]},
    PAPER | {"alpha": 2.0, "probs": [0.0, 0.25, 0.75]},
    PAPER
    | {
        "scores": ROWS["published_1.33"],
        "alpha": 1.33,
        "probs": [0.0460, 0.3276, 0.6264],
        "weights": [1.0, 0.0, 0.0],
        "d_alpha": -0.2562,
    },
]
SLOPES = (-0.228335, -0.289165, -0.358319, -0.475884, 0.510779, 0.553782)
for entry, slope in zip(PUBLISHED, SLOPES, strict=False):
    entry["d_alpha"] = slope


def make_case(row: str, alpha: float, target: int) -> Vector:
    """Compute the vector of one of CASES."""
    mp.dps = DIGITS
    return make_vector(f"{row}-{alpha:g}", ROWS[row], alpha, target)


def main() -> None:
    """Write the file, one vector on a line."""
    vectors = ",\n  ".join(json.dumps(make_case(*case)) for case in CASES)
    published = ",\n  ".join(json.dumps(entry) for entry in PUBLISHED)
    PATH.write_text(
        f'{{"vectors": [\n  {vectors}\n],\n"published": [\n  {published}\n]}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
