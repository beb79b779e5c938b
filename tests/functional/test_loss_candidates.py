"""The candidates of the entmax losses: they hold every support, and little beside it."""

import pytest
import torch
from torch import Tensor

from sparseformer.functional import entmax
from sparseformer.kernels.sparse_loss.candidates import Candidates

ROWS = 5
NO_LIMIT = 10**9


def _gather(
    scores: Tensor, alpha: float | Tensor, tile: int, limit: int = NO_LIMIT
) -> Candidates | None:
    top = scores.new_full(scores.shape[:1], -torch.inf)
    candidates = Candidates(top, alpha, limit, NO_LIMIT)
    for first in range(0, scores.shape[1], tile):
        part = scores[:, first : first + tile]
        top = torch.maximum(top, part.amax(-1))
        if not candidates.add(part, top, first):
            return None
    return candidates


def _draw(scale: float, classes: int = 700) -> Tensor:
    return scale * torch.randn(ROWS, classes, generator=torch.Generator().manual_seed(3))


def _ascending(classes: int = 700) -> Tensor:
    """The maximum is in the last tile, so that every earlier candidate has to go."""
    return torch.linspace(-30, 5, classes).expand(ROWS, classes).contiguous()


def _with_excluded() -> Tensor:
    scores = _draw(1.0)
    scores[1] = -torch.inf
    scores[2, 1:] = -torch.inf
    scores[:, ::3] = -torch.inf
    return scores


SCORES = {
    "flat": _draw(0.1),
    "normal": _draw(1.0),
    "peaked": _draw(30.0),
    "large": _draw(1.0) + 1e6,
    "constant": torch.full((ROWS, 700), 2.5),
    "ascending": _ascending(),
    "excluded": _with_excluded(),
}
ALPHAS = {
    "1.05": 1.05,
    "1.5": 1.5,
    "2": 2.0,
    "4": 4.0,
    "shared": torch.tensor([[1.3]]),
    "per-row": torch.linspace(1.01, 2.5, ROWS)[:, None],
}


@pytest.mark.parametrize("tile", [1, 64, 700])
@pytest.mark.parametrize("alpha", ALPHAS.values(), ids=ALPHAS)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_every_support_is_held(scores: Tensor, alpha: float | Tensor, tile: int) -> None:
    candidates = _gather(scores, alpha, tile)
    assert candidates is not None
    padded = candidates.padded()
    assert padded is not None
    values, columns = padded
    held = torch.zeros_like(scores, dtype=torch.bool)
    rows, places = (values > -torch.inf).nonzero(as_tuple=True)
    held[rows, columns[rows, places]] = True
    torch.testing.assert_close(values[rows, places], scores[rows, columns[rows, places]])
    wide = alpha.double() if isinstance(alpha, Tensor) else alpha
    support = entmax(scores.double(), wide) > 0
    assert bool((held | ~support).all()), (support & ~held).nonzero()


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_candidates_of_many_classes_stay_near_the_support(alpha: float) -> None:
    """A floor of max - 1 / (alpha - 1) alone would let about a tenth of them in at alpha 1.5."""
    scores = _draw(1.0, 20_000)
    support = int((entmax(scores, alpha) > 0).sum())
    limit = 4 * support + 400 * ROWS
    candidates = _gather(scores, alpha, 500, limit)
    assert candidates is not None, (support, limit)


def test_more_candidates_than_the_limit_are_noticed_at_the_first_tile() -> None:
    scores, top = torch.zeros(ROWS, 100), torch.full((ROWS,), -torch.inf)
    candidates = Candidates(top, 1.5, 99 * ROWS, NO_LIMIT)
    assert not candidates.add(scores, torch.zeros(ROWS), 0)


def test_one_row_too_wide_to_pad_is_noticed() -> None:
    scores = torch.full((ROWS, 100), -50.0)
    scores[0], scores[1:, 0] = 0.0, 0.0
    assert Candidates(_none(), 2.0, NO_LIMIT, 100 * ROWS).add(scores, scores.amax(-1), 0)
    assert not Candidates(_none(), 2.0, NO_LIMIT, 100 * ROWS - 1).add(scores, scores.amax(-1), 0)


def _none() -> Tensor:
    return torch.full((ROWS,), -torch.inf)
