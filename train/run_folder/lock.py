"""Ownership of a run's folder: one process at a time trains in it.

In a local folder the operating system keeps a lock on `owner.lock`, which ends with the process,
however it ends. A network file system of several hosts has to support `flock`: NFS and Lustre do,
unless they are mounted with local locks. Its server may keep the lock of a host that died for a
minute or two.

An object store has no locks, nor have some mounted file systems. There the owner's record,
`owner.json`, is renewed every few seconds (`RemoteOwner`). Another process that finds one watches
it for `TAKEOVER_SECONDS`, by its own clock, and takes the folder over if it has not changed. An
owner that was suspended meanwhile reads the record before it saves, and stops. Not covered: a
process that is suspended between that look and the end of its save, and the log lines of the steps
until then.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, Self

import filelock
import jax
from fsspec.core import url_to_fs

from train.errors import UserError
from train.parallel.distributed import barrier
from train.run_folder.folder import RunFolder
from train.runtime.writing import explain_write_errors, write_atomically

TAKEOVER_SECONDS = 60.0
"""Seconds without a renewal after which the owner of a remote folder counts as dead."""

# Twelve renewals fit into `TAKEOVER_SECONDS`: the store may fail for most of a minute.
RENEW_SECONDS = 5.0

SETTLE_SECONDS = 2.0

NETWORK_LOCK_SECONDS = 100.0
"""Seconds to wait for the lock of another host. An NFS server keeps that of a dead one for 90."""

# Every process takes part in every run, so this count is the same on all of them and makes the
# names of barriers unique.
_run_numbers = itertools.count()


@contextlib.contextmanager
def lock_run_folder(
    folder: RunFolder, print_message: Callable[[str], None]
) -> Iterator["RemoteOwner | None"]:
    """Own a run's folder inside the block. All processes of the run enter it together.

    `print_message` gets a line if another owner has to be waited for.

    Yields:
      On process 0 the owner of a folder without locks, who may be replaced; None in all other
      cases.

    Raises:
      UserError: Another process trains in this folder.
    """
    name = f"run-lock-{next(_run_numbers)}"
    if jax.process_index() != 0:
        barrier(name)  # nothing in the folder is read before process 0 owns it
        yield None
        return
    locks = isinstance(folder.path, pathlib.Path) and _has_locks(folder.path)
    with _lock(folder, print_message) if locks else RemoteOwner(folder, print_message) as owner:
        barrier(name)
        yield owner


def _has_locks(folder: pathlib.Path) -> bool:
    """Return False for a file system without locks, where filelock would leave its file forever."""
    with explain_write_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _lock(folder: RunFolder, print_message: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a local folder."""
    lock = filelock.FileLock(folder.lock)
    with explain_write_errors(folder.path):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            owner = _parse(folder.owner.read_bytes() if folder.owner.exists() else b"")
            if owner.get("host") == socket.gethostname():
                _refuse(folder, owner)
            print_message(f"{folder.path}: {_describe(owner)}, has its lock; waiting for it")
            try:
                lock.acquire(timeout=NETWORK_LOCK_SECONDS)
            except filelock.Timeout:
                _refuse(folder, owner)
    try:
        write_atomically(folder.owner, json.dumps(_record()))
        yield
    finally:
        # In this order: after the release, the record may be that of another owner.
        with contextlib.suppress(OSError):
            folder.owner.unlink(missing_ok=True)
        lock.release()


class RemoteOwner:
    """Owner of a folder without locks, by a record that it renews, as a context manager."""

    def __init__(
        self,
        folder: RunFolder,
        print_message: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Prepare the record. Nothing is written yet."""
        self._folder, self._print_message, self._sleep = folder, print_message, sleep
        self._files, self._path = url_to_fs(os.fspath(folder.owner))
        self._own = _record()
        # The renewal thread and the training loop both read and write the record.
        self._mutex = threading.Lock()
        self._replaced_by: dict[str, Any] | None = None
        self._stop = threading.Event()
        # A daemon thread: it must not keep a process alive whose training has ended with an error.
        self._thread = threading.Thread(target=self._renew_often, name="owner", daemon=True)

    def __enter__(self) -> Self:
        with explain_write_errors(self._folder.owner):
            if found := self._read():
                self._watch(found)
            self._write()
            # Of several processes that come here at the same moment, the last to write stays.
            self._sleep(SETTLE_SECONDS)
        self.verify_ownership()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()  # it must not write the record again after it is removed
        with contextlib.suppress(OSError):
            if self._read().get("token") == self._own["token"]:
                self._files.rm_file(self._path)

    def check_ownership(self) -> None:
        """Raise UserError if another process is known to have taken the folder. Reads nothing."""
        if self._replaced_by is not None:
            raise UserError(
                f"{self._folder.path}: was taken over by {_describe(self._replaced_by)}, because "
                f"this process had not renewed its record for {TAKEOVER_SECONDS:g} s; it stops "
                "here and saves nothing more"
            )

    def verify_ownership(self) -> None:
        """Read the record now, before writing what another owner would lose.

        Raises:
          UserError: Another process has taken the folder, or the record cannot be read.
        """
        with explain_write_errors(self._folder.owner):
            self._renew()
        self.check_ownership()

    def _watch(self, found: dict[str, Any]) -> None:
        """Return when the owner has ended or has not renewed its record; raise if it has."""
        self._print_message(
            f"{self._folder.path}: {_describe(found)}, has not released this folder; taking it "
            f"over unless that process renews its record within {TAKEOVER_SECONDS:g} s"
        )
        for _ in range(int(TAKEOVER_SECONDS)):
            self._sleep(1.0)
            now = self._read()
            if not now:
                return
            if now != found:
                _refuse(self._folder, now)

    def _renew_often(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            # A store that fails now may be back in five seconds.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        with self._mutex:
            # Read before it is written: a process that was suspended must not overwrite its
            # successor, and must stop if that has ended since.
            found = self._read()
            if found.get("token") != self._own["token"]:
                self._replaced_by = found
            elif self._replaced_by is None:
                self._write()

    def _write(self) -> None:
        # The count changes the content, which is what other processes watch.
        self._own["renewals"] += 1
        self._files.pipe_file(self._path, json.dumps(self._own).encode())

    def _read(self) -> dict[str, Any]:
        """Return the record; empty if there is none."""
        try:
            return _parse(self._files.cat_file(self._path))
        except FileNotFoundError:
            return {}


def _record() -> dict[str, Any]:
    """Return the record of this process as an owner."""
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "token": secrets.token_hex(8),
        "renewals": 0,
    }


def _parse(data: bytes) -> dict[str, Any]:
    """Return a record. One that is damaged is that of an unknown owner."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        record = None
    return record if isinstance(record, dict) and "process" in record else {"process": "unknown"}


def _describe(owner: dict[str, Any]) -> str:
    if "host" not in owner:
        return "another process"
    return f"process {owner['process']} on {owner['host']}, since {owner.get('since')}"


def _refuse(folder: RunFolder, owner: dict[str, Any]) -> NoReturn:
    raise UserError(
        f"{folder.path}: is in use by {_describe(owner)}; "
        "stop that process first, or give another --workdir"
    )
