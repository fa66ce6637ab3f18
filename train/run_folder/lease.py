"""Lease files of a run's folder: its owner, and whether that process still runs.

A lease is `owner/<number>.json`; the highest number is the current one. A process takes the folder
by creating the next number exclusively. On every file system and object store only one process
succeeds. The owner rewrites its file every few seconds, and removes it when it ends.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import re
import secrets
import socket
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from train.files import AnyPath

# The temporary files of `replace` begin with a dot, and do not match.
_LEASE_NAME = re.compile(r"([1-9][0-9]{0,8})\.json")


OwnerState = Literal["alive", "gone", "unknown"]


_HELD: set[str] = set()
"""Tokens of the leases held by this process. Two runs may be fitted in one process."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """One process's claim on a run's folder."""

    token: str = ""
    """Random; unique to this lease."""
    host: str = ""
    process: int = 0
    """Process id."""
    machine: str = ""
    """Boot id and PID namespace, within which `process` and `started` are valid; empty: unknown."""
    started: str = ""
    """Start time of the process, in clock ticks since the machine's boot."""
    since: str = ""
    """Time at which the lease was taken (UTC, ISO 8601)."""
    renewals: int = 0

    def renewed(self) -> "Lease":
        """Return the lease for the next renewal."""
        return dataclasses.replace(self, renewals=self.renewals + 1)

    def describe(self) -> str:
        """Return e.g. `process 4121 on node7, since 2026-11-23T20:11:03+00:00`."""
        if not self.token:
            return "another process"
        return f"process {self.process} on {self.host}, since {self.since}"

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Lease":
        """Parse a lease. A torn or damaged one becomes a lease with an unknown owner."""
        try:
            plain = json.loads(data.decode())
            lease = cls(**plain)
        # No JSON, other fields, or nested a thousand deep. The owner stays unknown, so only
        # renewals count, as for a lease of another machine.
        except (ValueError, TypeError, RecursionError):
            return cls()
        # The types of the fields, as JSON may hold anything.
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        sound = all(type(getattr(lease, name)) is kind for name, kind in kinds.items())
        return lease if sound else cls()


def new_lease() -> Lease:
    """Return a new lease of this process."""
    return Lease(
        token=secrets.token_hex(8),
        # For messages only; `machine` is what is compared.
        host=socket.gethostname(),
        process=os.getpid(),
        machine=machine_id(),
        started=_start_ticks(os.getpid()) or "",
        # For messages only as well: clocks of machines may differ.
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def mark_held(lease: Lease) -> Iterator[None]:
    """Mark a lease as held by this process inside the block."""
    # In memory: /proc knows processes, and cannot tell two runs of one process apart.
    _HELD.add(lease.token)
    try:
        yield
    finally:
        _HELD.discard(lease.token)


def machine_id() -> str:
    """Return an id shared by processes that see each other in /proc; empty without /proc."""
    try:
        # Containers on one machine share the boot id but not the process ids: the namespace tells
        # them apart.
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {pathlib.Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def owner_state(lease: Lease) -> OwnerState:
    """Return whether the owner's process still runs, as far as this machine can tell.

    The host name is not used: a container that is restarted elsewhere keeps it. The boot id and
    the PID namespace identify a machine, and the start time rules out a process id in reuse.
    """
    # Another run in this very process, for which the process id proves nothing.
    if lease.token in _HELD:
        return "alive"
    # Another machine, or a container of its own: only the renewals of the lease can tell.
    if not lease.machine or lease.machine != machine_id() or lease.process <= 0:
        return "unknown"
    if lease.process == os.getpid():
        return "gone"  # an earlier lease of this process, which could not be removed
    # Signal 0 sends nothing; it only checks that the process exists.
    try:
        os.kill(lease.process, 0)
    except ProcessLookupError:
        return "gone"
    except (PermissionError, OverflowError):
        return "unknown"  # another user's process, whose /proc entry may be hidden (hidepid)
    started = _start_ticks(lease.process)
    if started is None:
        return "gone"  # a zombie: it has ended, and its parent has not collected it
    return "alive" if started == lease.started else "gone"


def _start_ticks(process: int) -> str | None:
    """Return field 22 of /proc/<process>/stat; None for a process that has ended."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # Field 3, the state, is the first after the name. Field 22 is the start time: two processes of
    # one boot never share both it and the process id.
    fields = text.rpartition(")")[2].split()  # the process name before it may contain spaces
    return None if fields[0] in "ZX" else fields[19]


class LeaseStore(Protocol):
    """Storage of leases. Every method raises OSError if the storage cannot be reached."""

    def numbers(self) -> list[int]:
        """Return the numbers of all leases, in order."""
        ...

    def read(self, number: int) -> Lease | None:
        """Return a lease; None if it does not exist."""
        ...

    def create(self, number: int, lease: Lease) -> bool:
        """Write a new lease; return False if another process has created it before."""
        ...

    def replace(self, number: int, lease: Lease) -> None:
        """Overwrite a lease that this process owns."""
        ...

    def remove(self, number: int) -> None:
        """Remove a lease; with the last one, remove the folder too."""
        ...


def lease_store(folder: AnyPath) -> LeaseStore:
    """Return the store of a run's `owner` folder, local or remote."""
    # Local leases need no fsspec, whose import takes longer than everything else about a lock, and
    # are replaced by a rename, which no reader can see half of.
    return (
        LocalLeaseStore(folder)
        if isinstance(folder, pathlib.Path)
        else RemoteLeaseStore(str(folder))
    )


class LocalLeaseStore:
    """Leases in a local (or network) file system: `O_EXCL` makes creation exclusive."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def numbers(self) -> list[int]:
        try:
            # No folder: nobody has trained here, or the last owner has removed its lease.
            return _numbers([path.name for path in self._folder.iterdir()])
        except FileNotFoundError:
            return []

    def read(self, number: int) -> Lease | None:
        try:
            return Lease.from_bytes(self._path(number).read_bytes())
        except FileNotFoundError:
            return None

    def create(self, number: int, lease: Lease) -> bool:
        # Also after another process has removed the folder together with its last lease.
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            # "x" is O_EXCL: the file system lets exactly one process create the file.
            file = self._path(number).open("xb")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(lease.to_bytes())
        except OSError:  # a full disk: an empty lease would keep other processes waiting
            self.remove(number)
            raise
        return True

    def replace(self, number: int, lease: Lease) -> None:
        # Written beside it and renamed, so that a reader never sees half of a lease.
        # No fsync: a lease only has to be seen, and on a busy disk a sync takes seconds.
        path = self._path(number)
        # Named by the token: a former owner that wakes up must not write to the same file.
        temporary = path.with_name(f".{path.name}.{lease.token}")
        temporary.write_bytes(lease.to_bytes())
        temporary.replace(path)

    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            self._folder.rmdir()

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"{number}.json"


class RemoteLeaseStore:
    """Leases in an object store, through fsspec: a conditional write makes creation exclusive."""

    def __init__(self, folder: str):
        from fsspec.core import url_to_fs

        self._files: Any
        self._files, self._folder = url_to_fs(folder)

    def numbers(self) -> list[int]:
        self._files.invalidate_cache()  # gcsfs and s3fs cache listings
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        return _numbers([str(path).rpartition("/")[2] for path in paths])

    def read(self, number: int) -> Lease | None:
        try:
            return Lease.from_bytes(self._files.cat_file(self._path(number)))
        except FileNotFoundError:
            return None

    def create(self, number: int, lease: Lease) -> bool:
        # A store that does not know the mode `create` would overwrite the owner's lease.
        if number in self.numbers():
            return False
        refused: Exception | None = None
        try:
            self._files.pipe_file(self._path(number), lease.to_bytes(), mode="create")
        except Exception as error:  # noqa: BLE001, each store reports a failed condition differently
            refused = error
        # Read it back: a store may also fail after it has written the file.
        stored = self.read(number)
        if stored is None and refused is not None:
            raise refused if isinstance(refused, OSError) else OSError(str(refused))
        return stored is not None and stored.token == lease.token

    def replace(self, number: int, lease: Lease) -> None:
        # An object is replaced as a whole: no reader sees half of it.
        self._files.pipe_file(self._path(number), lease.to_bytes())

    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            # The next owner may have removed it first: it deletes all numbers below its own.
            self._files.rm_file(self._path(number))

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number}.json"


def _numbers(names: list[str]) -> list[int]:
    # As numbers: by name, 10 comes before 9.
    return sorted(int(match[1]) for name in names if (match := _LEASE_NAME.fullmatch(name)))
