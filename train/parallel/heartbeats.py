"""Signs of life that the processes of a run give each other, and the word that one has ended.

What waits for a process that has gone may wait for long: an all-reduce ends at once where the lost
process was its neighbour, and not at all elsewhere. So each has a thread that looks, and that ends
it. They meet in the key-value store that process 0 keeps.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from jax.errors import JaxRuntimeError

HEARTBEATS_KEY = "train/beats"


ENDED_KEY = "train/ended"


STOPPED = "left"
"""The beat of a process that nobody need wait for any more."""


class KeyValueStore(Protocol):
    """What JAX's distributed client can do; a folder's values come with their whole keys."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Heartbeats:
    """Those of one process, and its ear for the others'.

    Every process writes one value and reads one at each beat, whatever their number; process 0
    reads them all.
    """

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
        """Starts nothing yet.

        Args:
          store: Where they meet.
          index: The number of this process.
          end: Called once, on the thread, with what has become of another process, in words.
          interval: Seconds between two beats.
          silence: Seconds without a beat after which a process counts as gone.
          clock: Seconds, from any start.
        """
        self._store, self._index, self._end = store, process_index, on_lost_peer
        self._interval, self._silence, self._clock = interval, timeout, clock
        self._count = 0
        self._answered = clock()
        self._heard: dict[str, tuple[str, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begins to beat, and to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Nobody need wait for this process any more, and it for no other."""
        self._stopped.set()
        self._put(f"{HEARTBEATS_KEY}/{self._index}", STOPPED)

    def announce_exit(self, reason: str, wait_seconds: float = 6.0) -> None:
        """This process ends, and so the others have to.

        Process 0 waits for them so many seconds: the store ends with it.
        """
        self._put(f"{ENDED_KEY}/{self._index}", f"has ended ({reason[:200]})")
        self.stop()
        end = self._clock() + wait_seconds
        while self._index == 0 and self._clock() < end and not self._all_left():
            time.sleep(self._interval / 10)

    def beat(self) -> str | None:
        """Gives a sign, and looks for the others'. Returns what has become of one, in words."""
        now = self._clock()
        self._count += 1
        try:
            self._store.key_value_set(
                f"{HEARTBEATS_KEY}/{self._index}", str(self._count), allow_overwrite=True
            )
            ended = self._store.key_value_dir_get(ENDED_KEY)
            if not ended and self._index == 0:
                ended = self._silent(now)
        except JaxRuntimeError:
            silent = now - self._answered > self._silence
            return f"process 0 has not answered for {self._silence:g} s" if silent else None
        self._answered = now
        if not ended:
            return None
        key, what = ended[0]
        return f"process {_index(key)} {what}"

    def _silent(self, now: float) -> list[tuple[str, str]]:
        """Those that have not been heard for too long; the others are told."""
        for key, beat in self._store.key_value_dir_get(HEARTBEATS_KEY):
            if self._heard.get(key, ("", 0.0))[0] != beat:
                self._heard[key] = beat, now
        lost = [
            (f"{ENDED_KEY}/{_index(key)}", f"has not been heard of for {self._silence:g} s")
            for key, (beat, when) in self._heard.items()
            if beat != STOPPED and now - when > self._silence
        ]
        for key, what in lost:
            self._put(key, what)
        return lost

    def _all_left(self) -> bool:
        try:
            beats = self._store.key_value_dir_get(HEARTBEATS_KEY)
        except JaxRuntimeError:
            return True
        return all(beat == STOPPED for _, beat in beats)

    def _put(self, key: str, value: str) -> None:
        try:
            self._store.key_value_set(key, value, allow_overwrite=True)
        except JaxRuntimeError:
            return  # the store has gone with process 0: there is nobody to tell

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            what = self.beat()
            if what is not None and not self._stopped.is_set():
                self._stopped.set()
                self._end(what)


def _index(key: str) -> str:
    return key.rsplit("/", 1)[-1]
