"""A generated task for tests: copy a short string, or reverse it."""

import numpy as np

from sparseformer.data.pairs import Pair, PairDataset, Splits, make_dataset

ALPHABET = "abcde"
SYMBOLS = ("[copy]", "[reverse]")
TRAIN_ROWS, EVAL_ROWS = 1200, 150
SHORTEST, LONGEST = 2, 4


def load_copy(seed: int) -> PairDataset:
    """Generate `[copy]abc` -> `abc` and `[reverse]abc` -> `cba`.

    Args:
        seed: Chooses the strings, 0 or more.

    Returns:
        1,200 of the 1,550 inputs for training, 150 for validation and 150 for the test.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    pairs: dict[str, Pair] = {}
    while len(pairs) < TRAIN_ROWS + 2 * EVAL_ROWS:
        pair = _draw(generator)
        pairs[pair.src] = pair
    rows = list(pairs.values())
    first_test = TRAIN_ROWS + EVAL_ROWS
    splits = Splits(rows[:TRAIN_ROWS], rows[TRAIN_ROWS:first_test], rows[first_test:])
    return make_dataset("copy", splits, symbols=SYMBOLS)


def _draw(generator: np.random.Generator) -> Pair:
    length = int(generator.integers(SHORTEST, LONGEST + 1))
    letters = "".join(ALPHABET[i] for i in generator.integers(0, len(ALPHABET), length))
    symbol = SYMBOLS[int(generator.integers(len(SYMBOLS)))]
    return Pair(symbol + letters, letters if symbol == "[copy]" else letters[::-1])
