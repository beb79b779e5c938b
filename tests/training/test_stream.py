"""The stream of batches is a pure function of (seed, epoch, index)."""

from sparseformer.data import EncodedPairs, Tokenizer
from sparseformer.training.stream import BatchStream

TOKENIZER = Tokenizer.train(["a b c"], "word", 20)
ENCODED = EncodedPairs([[4, 5, 2]] * 37, [[6, 2]] * 37, 0, 0)


def _stream(epoch: int = 0, index: int = 0, seed: int = 3) -> BatchStream:
    return BatchStream(ENCODED, TOKENIZER, batch_tokens=25, seed=seed, epoch=epoch, index=index)


def test_stream_continues_from_any_position() -> None:
    whole = _stream()
    positions, rows = [], []
    for _ in range(20):  # 8 batches an epoch, so the positions include a boundary
        positions.append((whole.epoch, whole.index))
        rows.append(next(whole).rows)
    for start in (5, 7, 8, 9, 16):
        part = _stream(*positions[start])
        assert [next(part).rows for _ in range(20 - start)] == rows[start:]


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    stream = _stream()
    epochs = [[row for _ in range(8) for row in next(stream).rows] for _ in range(3)]
    assert all(sorted(rows) == list(range(37)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_another_seed_is_another_order() -> None:
    assert next(_stream(seed=3)).rows != next(_stream(seed=4)).rows
