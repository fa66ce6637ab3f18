"""Batches made ahead of time, on a thread of their own."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Generator
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(
    load: Callable[[int], Item], start: int = 0, *, buffer_size: int = 2
) -> Generator[tuple[int, Item]]:
    """Yields (cursor, load(cursor)) from ``start`` on, while the next ones are being loaded.

    What ``load`` raises is raised here, at its cursor. Closing the generator (``close()``, or
    ``contextlib.closing``) ends the thread.

    Args:
      load: For example ``batches.__getitem__``, or that and the copy to the device.
      start: The first cursor.
      ahead: How many are kept ready.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        cursors = itertools.count(start)
        ready = collections.deque(
            (cursor, pool.submit(load, cursor)) for cursor in itertools.islice(cursors, buffer_size)
        )
        while True:
            cursor, item = ready.popleft()
            following = next(cursors)
            ready.append((following, pool.submit(load, following)))
            yield cursor, item.result()
    finally:
        pool.shutdown(cancel_futures=True)
