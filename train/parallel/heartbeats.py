"""Heartbeats between the processes of a run, to notice when one of them has ended.

A collective that waits for a lost process ends at once on its neighbours in the ring, and never on
the others. So every process has a thread that writes its own heartbeat, looks for lost processes,
and ends its process if there is one. They communicate through the key-value store of process 0.

Each beat costs a process one write and one read, whatever the number of processes. Only process 0
reads all heartbeats; the others read the list of ended processes.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from jax.errors import JaxRuntimeError

HEARTBEATS_KEY = "train/beats"
ENDED_KEY = "train/ended"

STOPPED = "left"
"""Heartbeat of a process that has ended in order: nobody need wait for it."""


class KeyValueStore(Protocol):
    """Part of JAX's distributed client. Values of a directory come with their full keys."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Heartbeats:
    """Heartbeat thread of one process."""

    def __init__(
        self,
        store: KeyValueStore,
        process_index: int,
        on_lost_peer: Callable[[str], None],
        *,
        interval: float = 2.0,
        timeout: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the thread; `start` starts it.

        Args:
          store: Key-value store that all processes share.
          process_index: Index of this process.
          on_lost_peer: Called once, on the thread, with a description of the lost process.
          interval: Seconds between two heartbeats.
          timeout: Seconds without a heartbeat after which a process counts as lost.
          clock: Returns seconds from any origin.
        """
        self._store, self._index, self._on_lost_peer = store, process_index, on_lost_peer
        self._interval, self._timeout, self._clock = interval, timeout, clock
        self._count = 0
        # Time of the last answer of the store. Only its silence can reveal the end of process 0.
        self._store_answered_at = clock()
        # Last heartbeat of each process, and the time at which it was first seen.
        self._last_seen: dict[str, tuple[str, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and tell the others not to expect more heartbeats."""
        # The event first: a `beat` that is writing meanwhile then writes STOPPED again.
        self._stopped.set()
        self._put(f"{HEARTBEATS_KEY}/{self._index}", STOPPED)

    def announce_exit(self, reason: str, wait_seconds: float = 6.0) -> None:
        """Announce that this process has failed, so that the others end too.

        Args:
          reason: Description of the failure.
          wait_seconds: Longest time that process 0 waits for the others to read it. The store
            ends with process 0.
        """
        # Before `stop`: the others must not read STOPPED, an end in order, without the reason.
        self._put(f"{ENDED_KEY}/{self._index}", f"has ended ({reason[:200]})")
        self.stop()
        # The other processes poll the store; their own STOPPED says that they have read it.
        deadline = self._clock() + wait_seconds
        while self._index == 0 and self._clock() < deadline and not self._all_stopped():
            time.sleep(self._interval / 10)

    def beat(self) -> str | None:
        """Write a heartbeat and look for lost processes.

        Returns:
          Description of a lost process; None if there is none.
        """
        now = self._clock()
        self._count += 1
        try:
            # Counted by the writer and timed by the reader: clocks of hosts are never compared.
            self._store.key_value_set(
                f"{HEARTBEATS_KEY}/{self._index}", str(self._count), allow_overwrite=True
            )
            if self._stopped.is_set():
                self._put(f"{HEARTBEATS_KEY}/{self._index}", STOPPED)
            # Found by process 0, or announced by the process itself: one list for all processes.
            ended = self._store.key_value_dir_get(ENDED_KEY)
            # Process 0 alone compares heartbeats, so that the cost does not grow with the square
            # of the number of processes.
            if not ended and self._index == 0:
                ended = self._find_silent(now)
        except JaxRuntimeError:
            # The store is part of process 0. One failed request may be a network problem.
            silent = now - self._store_answered_at > self._timeout
            return f"process 0 has not answered for {self._timeout:g} s" if silent else None
        self._store_answered_at = now
        if not ended:
            return None
        key, description = ended[0]
        return f"process {_index_of(key)} {description}"

    def _find_silent(self, now: float) -> list[tuple[str, str]]:
        """Return the processes without a recent heartbeat, and list them for the others."""
        # A process that died before its first beat is not in this list: JAX's slower heartbeats,
        # which abort all processes, are left for that.
        for key, beat in self._store.key_value_dir_get(HEARTBEATS_KEY):
            # A heartbeat is a count. Only its changes are timed, by this process's clock.
            if self._last_seen.get(key, ("", 0.0))[0] != beat:
                self._last_seen[key] = beat, now
        lost = [
            (f"{ENDED_KEY}/{_index_of(key)}", f"has not been heard of for {self._timeout:g} s")
            for key, (beat, seen_at) in self._last_seen.items()
            if beat != STOPPED and now - seen_at > self._timeout
        ]
        # The others read this list, and end as well. Those on it may be alive and cut off from the
        # network: they end once the store has not answered them for as long.
        for key, description in lost:
            self._put(key, description)
        return lost

    def _all_stopped(self) -> bool:
        try:
            beats = self._store.key_value_dir_get(HEARTBEATS_KEY)
        except JaxRuntimeError:
            return True  # no store: nothing more to wait for
        return all(beat == STOPPED for _, beat in beats)

    def _put(self, key: str, value: str) -> None:
        try:
            self._store.key_value_set(key, value, allow_overwrite=True)
        except JaxRuntimeError:
            return  # the store has ended with process 0: nobody is left to tell

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            # `stop` may have been called meanwhile: a process that ends in order reports nothing.
            lost = self.beat()
            if lost is not None and not self._stopped.is_set():
                self._stopped.set()
                self._on_lost_peer(lost)


def _index_of(key: str) -> str:
    return key.rsplit("/", 1)[-1]
