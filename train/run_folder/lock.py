"""The lock of a run's folder: one process at a time trains in it.

On one machine the owner's process is looked up: while it lives a second one is refused at once,
and when it has died the next one starts at once. Across machines only the lease can be watched: an
owner that renews it is alive, and one that has not renewed it for `LEASE_SECONDS` counts as dead.
A job that is restarted elsewhere after a hard preemption therefore waits that long and resumes.
No clocks are compared: a lease is watched for changes, by the clock of the one who watches.

An owner that was suspended, or cut off from its storage, may wake up after it was replaced. So it
looks before each save whether the lease is still its own, and stops if it is not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn, Self

from train.errors import UserError
from train.run_folder.folder import RunFolder, explain_write_errors
from train.run_folder.lease import (
    Lease,
    LeaseStore,
    lease_store,
    mark_held,
    new_lease,
    owner_state,
)

LEASE_SECONDS = 60.0
"""An owner on another machine that has not renewed its lease for so long counts as dead."""


RENEW_INTERVAL_SECONDS = 5.0
"""Seconds between two renewals: how long it takes at most to see that an owner is alive."""


POLL_INTERVAL_SECONDS = 1.0


_runs = itertools.count()  # the same on every process: all take part in every run


class RunLock:
    """Ownership of a run's folder; a context manager.

    Only process 0 of a run enters one.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        print_message: Callable[[str], None],
        store: LeaseStore | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Prepare; nothing is written yet.

        Args:
          folder: The run's.
          say: Called with a line of text if another owner has to be waited for.
          store: The lease files; those of `folder` if None.
          clock: Seconds, from any start. It has to count the time that the machine is suspended.
          sleep: Waits so many seconds.
        """
        self._folder, self._say = folder, print_message
        self._store = store or lease_store(folder.lease_folder)
        self._clock, self._sleep = clock or _clock, sleep
        self._lease, self._number, self._renewed = new_lease(), 0, 0.0
        self._mutex = threading.Lock()
        self._replaced_by: Lease | None = None
        self._held = contextlib.ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_often, name="lease", daemon=True)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held_if_acquired:
            held_if_acquired.enter_context(mark_held(self._lease))
            with explain_write_errors(self._folder.lease_folder):
                self._acquire()
            self._held = held_if_acquired.pop_all()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        with self._held, contextlib.suppress(OSError), self._mutex:
            if self._is_current():
                self._store.remove(self._number)

    def check_ownership(self) -> None:
        """Raise UserError if another process has taken the folder. Cheap enough for every step."""
        if self._replaced_by is not None:
            self._refuse_to_continue(self._replaced_by)
        # This process may just have woken up: then its thread has not looked yet.
        if self._clock() - self._renewed > LEASE_SECONDS / 2:
            # Storage that cannot be reached is no reason to stop before something is to be saved.
            with contextlib.suppress(OSError), self._mutex:
                self._renew()
            if self._replaced_by is not None:
                self._refuse_to_continue(self._replaced_by)

    def verify_ownership(self) -> None:
        """Look at the lease now, before something is written that another owner would lose.

        Raises UserError if another process has taken the folder.
        """
        with explain_write_errors(self._folder.lease_folder), self._mutex:
            self._renew()
        if self._replaced_by is not None:
            self._refuse_to_continue(self._replaced_by)

    def _acquire(self) -> None:
        """Take the next number, once the owner of the last one is known to be gone."""
        gone: Lease | None = None
        while True:
            number, lease = self._newest()
            if lease is None or lease == gone:
                break
            self._wait_for_end_of(number, lease)
            gone = lease
        if not self._store.create(number + 1, self._lease):
            self._refuse(self._store.read(number + 1) or Lease())
        self._number, self._renewed = number + 1, self._clock()
        for old in self._store.numbers():
            if old < self._number:
                self._store.remove(old)

    def _wait_for_end_of(self, number: int, lease: Lease) -> None:
        """Return when the owner is gone; raise UserError if it is alive."""
        state = owner_state(lease)
        if state == "alive":
            self._refuse(lease)
        if state == "gone":
            return
        self._say(
            f"{self._folder.path}: {lease.describe()}, has not released this folder; taking it "
            f"over unless that process renews its lease within {LEASE_SECONDS:g} s"
        )
        began = self._clock()
        while self._clock() - began < LEASE_SECONDS:
            self._sleep(POLL_INTERVAL_SECONDS)
            found, now = self._newest()
            if now is None:  # it has ended in the meantime
                return
            if (found, now) != (number, lease):
                self._refuse(now)

    def _newest(self) -> tuple[int, Lease | None]:
        numbers = self._store.numbers()
        if not numbers:
            return 0, None
        return numbers[-1], self._store.read(numbers[-1]) or Lease()

    def _renew_often(self) -> None:
        while not self._stop.wait(RENEW_INTERVAL_SECONDS):
            with contextlib.suppress(OSError), self._mutex:
                self._renew()

    def _renew(self) -> None:
        if self._replaced_by is not None or not self._is_current():
            return
        renewed = self._lease.renewed()
        self._store.replace(self._number, renewed)
        self._lease, self._renewed = renewed, self._clock()

    def _is_current(self) -> bool:
        """Return whether the newest lease is this process's; note who has replaced it if not."""
        number, lease = self._newest()
        # Somebody removed the files, and nobody can have taken the folder: claim it again.
        if lease is None and self._clock() - self._renewed < LEASE_SECONDS:
            number, lease = self._number, self._lease
            if not self._store.create(number, lease):
                number, lease = self._newest()
        if lease is not None and (number, lease.token) == (self._number, self._lease.token):
            return True
        self._replaced_by = lease or Lease()
        return False

    def _refuse(self, owner: Lease) -> NoReturn:
        raise UserError(
            f"{self._folder.path}: is in use by {owner.describe()}; "
            "stop that process first, or give another --workdir"
        )

    def _refuse_to_continue(self, owner: Lease) -> NoReturn:
        raise UserError(
            f"{self._folder.path}: was taken over by {owner.describe()}, because this process had "
            f"not renewed its lease for {LEASE_SECONDS:g} s; it stops here and saves nothing more"
        )


@contextlib.contextmanager
def lock_run_folder(
    folder: RunFolder, print_message: Callable[[str], None]
) -> Iterator[RunLock | None]:
    """Own a run's folder inside; all processes of the run enter this together.

    Args:
      folder: The run's.
      say: Called with a line of text if another owner has to be waited for.

    Yields:
      The lock, on process 0; None on the others.

    Raises:
      UserError: another process trains in this folder.
    """
    import jax

    from train.parallel.distributed import barrier

    place = f"run-lock-{next(_runs)}"
    if jax.process_index() != 0:
        barrier(place)  # nothing of the folder is read before it is ours
        yield None
        return
    with RunLock(folder, print_message=print_message) as lock:
        barrier(place)
        yield lock


def _clock() -> float:
    """Seconds since the boot, those included in which the machine was suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
