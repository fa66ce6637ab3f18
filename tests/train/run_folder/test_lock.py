"""One owner per folder: refusals, waiting, takeover, and owners that notice their replacement."""

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.run_folder import lock
from train.run_folder.folder import RunFolder
from train.run_folder.lock import TAKEOVER_SECONDS, RemoteOwner, lock_run_folder

ELSEWHERE = {
    "process": 4121,
    "host": "node7",
    "since": "2026-11-23T20:11:03Z",
    "token": "other",
    "renewals": 3,
}


# ---- Local folders ----


def test_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    """Also by another run of the same process."""
    folder = RunFolder.create(tmp_path)
    for _ in range(2):
        with lock_run_folder(folder, print) as owner:
            assert owner is None  # the operating system keeps the lock
            with (
                pytest.raises(UserError, match=r"is in use by process \d+ on .*, since 20.*; stop"),
                lock_run_folder(folder, print),
            ):
                pass
    assert [path.name for path in tmp_path.iterdir()] == ["owner.lock"]


def test_killed_local_run_is_replaced_immediately(tmp_path: Path) -> None:
    hold = (
        "import sys, time\n"
        "from train.run_folder.lock import lock_run_folder\n"
        "from train.run_folder.folder import RunFolder\n"
        "with lock_run_folder(RunFolder.create(sys.argv[1]), print):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(100)\n"
    )
    folder = RunFolder.create(tmp_path)
    with subprocess.Popen([sys.executable, "-c", hold, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        refused = f"in use by process {other.pid} on"
        with pytest.raises(UserError, match=refused), lock_run_folder(folder, print):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with lock_run_folder(folder, pytest.fail):
            assert json.loads(folder.owner.read_text())["process"] != other.pid


def test_unwritable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "owner.lock").mkdir()  # root may write anywhere
    with (
        pytest.raises(UserError, match=r"cannot be written \(Is a directory\); make room there"),
        lock_run_folder(RunFolder.create(tmp_path), print),
    ):
        pass


def test_lock_of_another_host_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may keep the lock of a host that died, for a while."""
    folder, said = RunFolder.create(tmp_path), list[str]()
    monkeypatch.setattr(lock, "NETWORK_LOCK_SECONDS", 0.2)
    with lock_run_folder(folder, print):
        folder.owner.write_text(json.dumps(ELSEWHERE))
        began = time.monotonic()
        with (
            pytest.raises(UserError, match="in use by process 4121 on node7, since 2026-11-23"),
            lock_run_folder(folder, said.append),
        ):
            pass
    assert time.monotonic() - began >= 0.2
    assert len(said) == 1


def test_file_system_without_locks_has_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)
    with lock_run_folder(RunFolder.create(tmp_path), pytest.fail) as owner:
        assert owner is not None
        owner.verify_ownership()
    assert list(tmp_path.iterdir()) == []


# ---- Remote folders ----


class Store:
    """Record of a remote folder; `meanwhile` is called once per second that passes."""

    def __init__(self, folder: RunFolder, meanwhile: Callable[[], object] = lambda: None):
        self.folder, self.meanwhile, self.seconds = folder, meanwhile, 0.0
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        assert self.seconds < 1000, "it waits forever"
        self.meanwhile()

    def owner(self) -> RemoteOwner:
        return RemoteOwner(self.folder, self.said.append, self.sleep)

    def write(self, record: dict[str, Any]) -> None:
        self.folder.owner.write_text(json.dumps(record))


@pytest.fixture
def store(bucket: str) -> Store:
    return Store(RunFolder.create(f"{bucket}/run"))


def test_free_remote_folder_is_taken_and_released(store: Store) -> None:
    for _ in range(2):
        with store.owner() as owner:
            owner.verify_ownership()
            owner.check_ownership()
        assert not store.folder.owner.exists()
    assert store.said == []
    assert store.seconds < TAKEOVER_SECONDS


def test_live_remote_owner_is_detected_by_its_renewals(store: Store) -> None:
    store.write(ELSEWHERE)

    def renew() -> None:
        if store.seconds > 4:
            store.write({**ELSEWHERE, "renewals": 4})

    store.meanwhile = renew
    with pytest.raises(UserError, match="in use by process 4121 on node7"), store.owner():
        pass
    assert store.seconds == 5.0
    assert len(store.said) == 1
    assert "within 60 s" in store.said[0]


@pytest.mark.parametrize("record", [json.dumps(ELSEWHERE), "{", "[5]", "", "[" * 99_999])
def test_dead_remote_owner_is_replaced_after_a_minute(store: Store, record: str) -> None:
    store.folder.owner.write_text(record)
    with store.owner() as owner:
        assert store.seconds == TAKEOVER_SECONDS + lock.SETTLE_SECONDS
        owner.verify_ownership()


def test_one_of_two_that_start_together_trains(store: Store) -> None:
    store.meanwhile = lambda: store.write(ELSEWHERE)  # just after this one
    with pytest.raises(UserError, match="was taken over by process 4121"), store.owner():
        pass
    assert json.loads(store.folder.owner.read_text()) == ELSEWHERE


def test_owner_may_finish_while_another_waits(store: Store) -> None:
    store.write(ELSEWHERE)
    store.meanwhile = lambda: store.folder.owner.unlink(missing_ok=True)
    owner = store.owner()
    with pytest.raises(UserError, match="was taken over by another process"), owner:
        pass  # and its own record is removed too, as the last thing that happens in this store
    assert store.seconds == 1.0 + lock.SETTLE_SECONDS


@pytest.mark.parametrize("finished", [False, True])
def test_replaced_owner_notices_before_saving(store: Store, finished: bool) -> None:
    with store.owner() as owner:
        owner.verify_ownership()
        if finished:  # and the new owner has removed its record
            store.folder.owner.unlink()
        else:
            store.write(ELSEWHERE)
        with pytest.raises(UserError, match=r"was taken over by .*saves nothing more"):
            owner.verify_ownership()
        with pytest.raises(UserError, match="was taken over"):
            owner.check_ownership()
    # It does not release another owner's record.
    assert finished or json.loads(store.folder.owner.read_text()) == ELSEWHERE


def test_owner_renews_its_record_in_the_background(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.01)
    with store.owner() as owner:
        end = time.monotonic() + 60
        while json.loads(store.folder.owner.read_text())["renewals"] < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        store.write(ELSEWHERE)
        while owner._replaced_by is None:
            assert time.monotonic() < end
            time.sleep(0.01)
