import collections
import contextlib
import threading

import numpy as np
import pytest

from tests.train.data.conftest import MakeStream
from train.data.batches import TextTrainingBatches, prefetch
from train.data.token_file import TokenStream
from train.errors import UserError


def training(
    stream: TokenStream, batch_size: int, length: int, *, seed: int = 5, masking: bool = True
) -> TextTrainingBatches:
    return TextTrainingBatches(
        stream, batch_size=batch_size, sequence_length=length, seed=seed, document_masking=masking
    )


def rows(batches: TextTrainingBatches, count: int) -> list[list[int]]:
    """Return the first ``count`` windows, each as the tokens it spans."""
    spans = []
    for cursor in range(-(-count // batches.batch_size)):
        batch = batches.host_batch(cursor, 0, 1)
        spans += np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1).tolist()
    return spans[:count]


@pytest.mark.parametrize(
    ("seed", "tokens", "segments", "positions"),
    [
        (1, [0, 1, 2, 3, 0, 4, 5, 0, 6], [1, 1, 1, 1, 2, 2, 2, 3, 3], [0, 1, 2, 3, 0, 1, 2, 0, 1]),
        (8, [2, 3, 0, 4, 5, 0, 6, 0, 1], [1, 1, 2, 2, 2, 3, 3, 4, 4], [0, 1, 0, 1, 2, 0, 1, 0, 1]),
        (6, [0, 4, 5, 0, 6, 0, 1, 2, 3], [1, 1, 1, 2, 2, 3, 3, 3, 3], [0, 1, 2, 0, 1, 0, 1, 2, 3]),
        (2, [4, 5, 0, 6, 0, 1, 2, 3, 0], [1, 1, 2, 2, 3, 3, 3, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3, 0]),
    ],
    ids=["whole", "in the first", "at the second", "in the second"],
)
def test_window_matches_hand_computed_values(
    make_stream: MakeStream, seed: int, tokens: list[int], segments: list[int], positions: list[int]
) -> None:
    # 0 1 2 3 0 4 5 0 6 (0): nine targets; a window of nine is a full circle from a seeded start.
    batch = training(make_stream([1, 2, 3], [4, 5], [6]), 1, 9, seed=seed).host_batch(0, 0, 1)
    assert batch["tokens"].tolist() == [tokens]
    assert batch["targets"].tolist() == [[*tokens[1:], tokens[0]]]
    assert batch["segments"].tolist() == [segments]
    assert batch["positions"].tolist() == [positions]
    assert batch["weights"].tolist() == [[1] * 9]
    assert {name: array.dtype.name for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "segments", "positions"), "int32"),
        "weights": "float32",
        "examples": "uint32",
    }


def test_without_segments_a_window_is_one_segment(make_stream: MakeStream) -> None:
    batch = training(make_stream([1, 2, 3], [4, 5], [6]), 2, 4, masking=False).host_batch(0, 0, 1)
    assert (batch["segments"] == 1).all()
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("length", [1, 7, 53])
def test_each_epoch_has_every_target_once(make_stream: MakeStream, length: int) -> None:
    # 53 targets with distinct values, except the separators at both ends of the circle.
    batches = training(make_stream(list(range(1, 53))), 3, length)
    per_epoch = 53 // length
    assert batches.windows_per_epoch == per_epoch
    windows = rows(batches, 4 * per_epoch)
    cuts = set()
    for epoch in range(4):
        spans = windows[epoch * per_epoch :][:per_epoch]
        visible = collections.Counter(token for span in spans for token in span[1:])
        assert set(visible.values()) == {1}
        assert len(visible) == per_epoch * length
        for span in spans:
            assert np.diff(span).tolist() == [1 if token < 52 else -52 for token in span[:-1]]
        cuts.add(frozenset(span[0] % 53 for span in spans))
    assert length == 1 or len(cuts) > 1


def test_example_depends_on_seed_and_index_only(make_stream: MakeStream) -> None:
    stream = make_stream(list(range(1, 100)), list(range(100, 180)))
    expected = rows(training(stream, 1, 11), 72)
    assert rows(training(stream, 8, 11), 72) == rows(training(stream, 6, 11), 72) == expected
    late = training(stream, 8, 11).host_batch(5, 0, 1)
    assert late["tokens"].tolist() == [span[:-1] for span in expected[40:48]]
    assert rows(training(stream, 8, 11, seed=6), 72) != expected


@pytest.mark.parametrize("hosts", [2, 4])
def test_order_is_independent_of_the_number_of_hosts(make_stream: MakeStream, hosts: int) -> None:
    stream = make_stream(list(range(1, 100)), list(range(100, 180)))
    for cursor in (0, 3, 1001):
        shares = [training(stream, 8, 11).host_batch(cursor, host, hosts) for host in range(hosts)]
        for name, array in training(stream, 8, 11).host_batch(cursor, 0, 1).items():
            np.testing.assert_array_equal(np.concatenate([each[name] for each in shares]), array)


def test_order_matches_the_recorded_one(make_stream: MakeStream) -> None:
    """A run resumed with a newer version must keep the order it started with."""
    batches = training(make_stream(list(range(1, 100))), 6, 7, seed=7)
    assert [span[0] for span in rows(batches, 6)] == [24, 59, 80, 10, 3, 31]
    assert batches.host_batch(10**6, 0, 1)["tokens"][:, 0].tolist() == [67, 74, 4, 81, 60, 32]


def test_example_numbers_wrap_at_32_bits(make_stream: MakeStream) -> None:
    batches = training(make_stream([1, 2, 3]), 4, 2)
    assert batches.host_batch(2**30, 0, 1)["examples"].tolist() == [0, 1, 2, 3]
    assert batches.host_batch(2**30 - 1, 0, 1)["examples"].tolist() == [
        2**32 - 4 + n for n in range(4)
    ]


def test_too_little_text_is_an_error(make_stream: MakeStream) -> None:
    stream = make_stream([1, 2, 3])
    training(stream, 1, 4, seed=0)
    with pytest.raises(UserError, match="5 tokens are fewer than one window of 6"):
        training(stream, 1, 5)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_prefetch_keeps_the_order() -> None:
    with contextlib.closing(prefetch(lambda cursor: cursor * cursor, 5)) as items:
        assert [next(items) for _ in range(4)] == [(5, 25), (6, 36), (7, 49), (8, 64)]
        assert threads()
    assert not threads()


def test_prefetch_loads_no_more_than_requested() -> None:
    loaded: list[int] = []
    with contextlib.closing(prefetch(loaded.append, buffer_size=3)) as items:
        for _ in range(2):
            next(items)
    assert loaded[:2] == [0, 1]
    assert len(loaded) <= 2 + 3
    assert loaded == sorted(loaded)


def test_error_is_raised_at_its_cursor() -> None:
    def load(cursor: int) -> int:
        if cursor == 2:
            raise ValueError("damaged")
        return cursor

    items = prefetch(load)
    assert [next(items), next(items)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="damaged"):
        next(items)
    assert not threads()
    assert next(items, None) is None
