import numpy as np

from train.data.buckets import RaggedArray

SEQUENCES = [np.array(tokens, np.int64) for tokens in ([5, 6, 7], [], [8], [9, 10])]


def test_sequences_stay_what_they_were() -> None:
    ragged = RaggedArray.from_sequences(SEQUENCES)
    assert len(ragged) == 4
    assert ragged.lengths.tolist() == [3, 0, 1, 2]
    assert [ragged[n].tolist() for n in range(4)] == [[5, 6, 7], [], [8], [9, 10]]
    assert ragged.values.dtype == np.int32


def test_padded_by_hand() -> None:
    numbers, real = RaggedArray.from_sequences(SEQUENCES).pad(np.array([3, -1, 0, 1, 3]), 4)
    assert numbers.tolist() == [[9, 10, 0, 0], [0] * 4, [5, 6, 7, 0], [0] * 4, [9, 10, 0, 0]]
    assert real.sum(axis=1).tolist() == [2, 0, 3, 0, 2]
    assert real[:, 0].tolist() == [True, False, True, False, True]
    assert [numbers.dtype.name, real.dtype.name] == ["int32", "bool"]


def test_nothing_at_all() -> None:
    assert len(RaggedArray.from_sequences([])) == 0
    assert RaggedArray.from_sequences([]).lengths.tolist() == []
