import contextlib
import threading

import pytest

from train.data.batches import prefetch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_items_come_in_order_from_the_start() -> None:
    with contextlib.closing(prefetch(lambda cursor: cursor * cursor, 5)) as items:
        assert [next(items) for _ in range(4)] == [(5, 25), (6, 36), (7, 49), (8, 64)]
        assert threads()
    assert not threads()


def test_no_more_is_loaded_than_asked_for() -> None:
    loaded: list[int] = []
    with contextlib.closing(prefetch(loaded.append, buffer_size=3)) as items:
        for _ in range(2):
            next(items)
    assert loaded[:2] == [0, 1]
    assert len(loaded) <= 2 + 3
    assert loaded == sorted(loaded)


def test_an_error_is_raised_at_its_cursor() -> None:
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


def test_loading_happens_on_another_thread() -> None:
    with contextlib.closing(prefetch(lambda _: threading.current_thread().name)) as items:
        assert "prefetch" in next(items)[1]
