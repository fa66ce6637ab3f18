import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data.buckets import RaggedArray, bucket_by_rows, bucket_by_tokens


def test_buckets_match_hand_computed_values() -> None:
    # Two buckets: five of length 2, and the three of 7 to 9 (1 + 2 + 0 tokens of padding).
    lengths = np.array([2, 9, 2, 2, 7, 2, 8, 2])[:, None]
    short, long = bucket_by_rows(lengths, batch_size=3, max_buckets=2)
    assert (short.batch_size, short.lengths, short.examples.tolist()) == (3, (2,), [0, 2, 3, 5, 7])
    assert (long.batch_size, long.lengths, long.examples.tolist()) == (3, (9,), [1, 4, 6])


def test_each_side_has_its_own_length() -> None:
    lengths = np.array([[3, 5], [4, 2], [1, 5], [20, 11], [17, 13]])
    short, long = bucket_by_rows(lengths, batch_size=2, max_buckets=2)
    assert (short.lengths, long.lengths) == ((4, 5), (20, 13))


@pytest.mark.parametrize(
    ("row_multiple", "rows"), [(1, [20, 5, 1]), (4, [20, 4, 4]), (3, [18, 3, 3])]
)
def test_rows_depend_on_the_longer_side(row_multiple: int, rows: list[int]) -> None:
    lengths = np.array([[3, 5]] * 180 + [[20, 11]] * 60 + [[70, 2]] * 60)
    buckets = bucket_by_tokens(lengths, batch_tokens=100, batch_size_multiple=row_multiple)
    assert [bucket.batch_size for bucket in buckets] == rows


@pytest.mark.parametrize(
    ("count", "row_multiple", "most", "rows"),
    [
        (21, 1, 0, 11),
        (21, 4, 0, 12),
        (20, 4, 0, 20),
        (61, 4, 0, 16),
        (3, 4, 0, 4),
        (21, 1, 7, 7),
        (21, 4, 6, 4),
    ],
)
def test_rows_are_minimal_for_the_number_of_batches(
    count: int, row_multiple: int, most: int, rows: int
) -> None:
    (bucket,) = bucket_by_tokens(
        np.full((count, 2), 5), batch_tokens=100, batch_size=most, batch_size_multiple=row_multiple
    )
    assert bucket.batch_size == rows


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 5))
def test_buckets_minimize_padding(numbers: list[int], most: int) -> None:
    lengths = np.array(numbers)[:, None]
    buckets = bucket_by_rows(lengths, batch_size=1, max_buckets=most)
    # As many as allowed, or one for each length; each is padded to its longest example.
    assert len(buckets) == min(most, len(set(numbers)))
    edges = [bucket.lengths[0] for bucket in buckets]
    assert edges == sorted(set(edges))
    examples = np.concatenate([bucket.examples for bucket in buckets])
    assert sorted(examples.tolist()) == list(range(len(numbers)))
    for bucket in buckets:
        assert lengths[bucket.examples].max() == bucket.lengths[0]

    def padded(edges: tuple[int, ...]) -> int:
        return sum(min(edge for edge in edges if edge >= number) for number in numbers)

    values = sorted(set(numbers))
    least = min(
        padded((*some, values[-1]))
        for count in range(most)
        for some in itertools.combinations(values[:-1], count)
    )
    assert padded(tuple(edges)) == least
    assert sum(len(bucket.examples) * bucket.lengths[0] for bucket in buckets) == least


SEQUENCES = [np.array(tokens, np.int64) for tokens in ([5, 6, 7], [], [8], [9, 10])]


def test_sequences_round_trip() -> None:
    ragged = RaggedArray.from_sequences(SEQUENCES)
    assert len(ragged) == 4
    assert ragged.lengths.tolist() == [3, 0, 1, 2]
    assert [ragged[n].tolist() for n in range(4)] == [[5, 6, 7], [], [8], [9, 10]]
    assert ragged.values.dtype == np.int32
    assert RaggedArray.from_sequences([]).lengths.tolist() == []


def test_padding_matches_hand_computed_values() -> None:
    numbers, real = RaggedArray.from_sequences(SEQUENCES).pad(np.array([3, -1, 0, 1, 3]), 4)
    assert numbers.tolist() == [[9, 10, 0, 0], [0] * 4, [5, 6, 7, 0], [0] * 4, [9, 10, 0, 0]]
    assert real.sum(axis=1).tolist() == [2, 0, 3, 0, 2]
    assert real[:, 0].tolist() == [True, False, True, False, True]
    assert [numbers.dtype.name, real.dtype.name] == ["int32", "bool"]
