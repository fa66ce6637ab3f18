"""Lock a run's folder: one process at a time trains in it.

The lock is a lease file that its owner renews every few seconds (`train.run_folder.lease`).

- On one machine, the owner's process is looked up. While it lives, a second process is refused at
  once; when it has died, the next one starts at once.
- Across machines, only the lease can be observed. An owner that renews it is alive; one that has
  not renewed it for `LEASE_SECONDS` counts as dead. A job that is restarted on another machine
  after a hard preemption waits that long, and resumes.

Clocks of different machines are never compared: a process watches the lease for changes, by its
own clock.

An owner that was suspended, or cut off from its storage, may wake up after it was replaced. It
therefore reads the lease before each save, and stops if the lease is no longer its own.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn, Self

from train.errors import UserError
from train.run_folder.folder import RunFolder
from train.run_folder.lease import (
    Lease,
    LeaseStore,
    lease_store,
    mark_held,
    new_lease,
    owner_state,
)
from train.run_folder.writing import explain_write_errors

LEASE_SECONDS = 60.0
"""Seconds without a renewal after which an owner on another machine counts as dead."""

# Twelve renewals fit into `LEASE_SECONDS`: storage may fail for most of a minute.
RENEW_INTERVAL_SECONDS = 5.0
"""Seconds between renewals, and so the longest time until a living owner is noticed."""

POLL_INTERVAL_SECONDS = 1.0

# Every process takes part in every run, so this count is the same on all of them and makes the
# names of barriers unique.
_run_numbers = itertools.count()


class RunLock:
    """Ownership of a run's folder, as a context manager. Only process 0 of a run enters it."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        print_message: Callable[[str], None],
        store: LeaseStore | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Prepare the lock. Nothing is written yet.

        Args:
          folder: Folder of the run.
          print_message: Called with one line if another owner has to be waited for.
          store: Storage of the lease files; None: the `owner` folder in `folder`.
          clock: Returns seconds from any origin. It must count the time in which the machine is
            suspended.
          sleep: Waits for a number of seconds.
        """
        self._folder, self._print_message = folder, print_message
        self._store = store or lease_store(folder.lease_folder)
        # Linux stops the monotonic clock while a machine is suspended, and the lease would seem
        # fresh.
        self._clock, self._sleep = clock or _boot_clock, sleep
        self._lease, self._number, self._renewed_at = new_lease(), 0, 0.0
        # The renewal thread and the training loop both renew the lease.
        self._mutex = threading.Lock()
        self._replaced_by: Lease | None = None
        self._held = contextlib.ExitStack()
        self._stop = threading.Event()
        # A daemon thread: it must not keep a process alive whose training has ended with an error.
        self._thread = threading.Thread(target=self._renew_often, name="lease", daemon=True)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held_if_acquired:
            # Marked before the file exists: another run in this process, whose process id is the
            # same, must never find an unmarked lease and take it for a dead owner's.
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
        # The thread must not write the lease again after it is removed.
        self._stop.set()
        self._thread.join()
        with self._held, contextlib.suppress(OSError), self._mutex:
            # Not if another process has taken over: that file is then its own.
            if self._is_current():
                self._store.remove(self._number)

    def check_ownership(self) -> None:
        """Raise UserError if another process has taken the folder. Cheap enough for every step."""
        self._raise_if_replaced()
        # A process that has just woken up comes here before its thread has read the lease.
        if self._clock() - self._renewed_at > LEASE_SECONDS / 2:
            # Unreachable storage is not a reason to stop, as long as nothing has to be saved.
            with contextlib.suppress(OSError), self._mutex:
                self._renew()
            self._raise_if_replaced()

    def verify_ownership(self) -> None:
        """Read the lease now, before writing what another owner would lose.

        Raises:
          UserError: Another process has taken the folder, or the lease cannot be read.
        """
        with explain_write_errors(self._folder.lease_folder), self._mutex:
            self._renew()
        self._raise_if_replaced()

    def _acquire(self) -> None:
        """Create the next lease, once the owner of the current one is known to be gone."""
        gone: Lease | None = None
        while True:
            number, lease = self._newest()
            if lease is None or lease == gone:
                break
            # Raises unless the owner is gone. To wait takes a minute, in which the lease may
            # change.
            self._wait_until_gone(number, lease)
            gone = lease  # read once more: another process may have been faster
        # Creation is exclusive. Of several processes that got here, one succeeds.
        if not self._store.create(number + 1, self._lease):
            self._refuse(self._store.read(number + 1) or Lease())
        self._number, self._renewed_at = number + 1, self._clock()
        # Numbers only grow while the folder is owned, so an old owner that wakes up sees a higher
        # one. The leases below can go.
        for old in self._store.numbers():
            if old < self._number:
                self._store.remove(old)

    def _wait_until_gone(self, number: int, lease: Lease) -> None:
        """Return when the owner is gone; raise UserError if it is alive."""
        state = owner_state(lease)
        if state == "alive":
            self._refuse(lease)
        if state == "gone":
            return
        self._print_message(
            f"{self._folder.path}: {lease.describe()}, has not released this folder; taking it "
            f"over unless that process renews its lease within {LEASE_SECONDS:g} s"
        )
        # Watch the lease for a whole period. A change proves that the owner is alive.
        start = self._clock()
        while self._clock() - start < LEASE_SECONDS:
            self._sleep(POLL_INTERVAL_SECONDS)
            current_number, current = self._newest()
            if current is None:  # the owner has ended and removed its lease
                return
            # By value: a renewal, another owner, or a lease that could be read only now.
            if (current_number, current) != (number, lease):
                self._refuse(current)

    def _newest(self) -> tuple[int, Lease | None]:
        """Return the number and content of the current lease; (0, None) if there is no lease."""
        numbers = self._store.numbers()
        if not numbers:
            return 0, None
        # Removed since it was listed: an unknown owner, until the next look finds no lease.
        return numbers[-1], self._store.read(numbers[-1]) or Lease()

    def _renew_often(self) -> None:
        while not self._stop.wait(RENEW_INTERVAL_SECONDS):
            # Storage that fails now may be back in five seconds: `check_ownership` counts the time.
            with contextlib.suppress(OSError), self._mutex:
                self._renew()

    def _renew(self) -> None:
        """Renew the lease if it is still this process's. The caller holds the mutex."""
        # Read before it is written: a process that was suspended must not overwrite its successor.
        if self._replaced_by is not None or not self._is_current():
            return
        # The count of renewals changes the content, which is what other processes watch.
        renewed = self._lease.renewed()
        self._store.replace(self._number, renewed)
        self._lease, self._renewed_at = renewed, self._clock()

    def _is_current(self) -> bool:
        """Return True if the newest lease is this process's; otherwise remember its owner."""
        number, lease = self._newest()
        # Somebody deleted the lease files. Within `LEASE_SECONDS` no other process can have owned
        # the folder and released it again, so this process may claim it again.
        if lease is None and self._clock() - self._renewed_at < LEASE_SECONDS:
            number, lease = self._number, self._lease
            if not self._store.create(number, lease):
                number, lease = self._newest()
        if lease is not None and (number, lease.token) == (self._number, self._lease.token):
            return True
        # Remembered: from now on this process writes nothing in the folder.
        self._replaced_by = lease or Lease()
        return False

    def _refuse(self, owner: Lease) -> NoReturn:
        raise UserError(
            f"{self._folder.path}: is in use by {owner.describe()}; "
            "stop that process first, or give another --workdir"
        )

    def _raise_if_replaced(self) -> None:
        if self._replaced_by is not None:
            raise UserError(
                f"{self._folder.path}: was taken over by {self._replaced_by.describe()}, because "
                f"this process had not renewed its lease for {LEASE_SECONDS:g} s; it stops here "
                "and saves nothing more"
            )


@contextlib.contextmanager
def lock_run_folder(
    folder: RunFolder, print_message: Callable[[str], None]
) -> Iterator[RunLock | None]:
    """Own a run's folder inside the block. All processes of the run enter it together.

    Args:
      folder: Folder of the run.
      print_message: Called with one line if another owner has to be waited for.

    Yields:
      The lock on process 0; None on the others.

    Raises:
      UserError: Another process trains in this folder.
    """
    import jax

    from train.parallel.distributed import barrier

    name = f"run-lock-{next(_run_numbers)}"
    if jax.process_index() != 0:
        barrier(name)  # nothing in the folder is read before process 0 owns it
        yield None
        return
    with RunLock(folder, print_message=print_message) as lock:
        barrier(name)
        yield lock


def _boot_clock() -> float:
    """Return the seconds since the boot, including the time in which the machine was suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
