"""One owner per folder: errors, waiting, takeover, and owners that notice their replacement."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.run_folder.folder import RunFolder
from train.run_folder.lease import (
    Lease,
    LeaseStore,
    lease_store,
    machine_id,
    new_lease,
    owner_state,
)
from train.run_folder.lock import LEASE_SECONDS, RunLock

ELSEWHERE = Lease("other", "node7", 4121, "another machine", "1", "2026-11-23T20:11:03+00:00")


class Time:
    """Clock that advances only by sleeping; `meanwhile` is called once per second."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None):
        self.now, self._meanwhile = 100.0, meanwhile

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000, "it waits forever"
        self._meanwhile()


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> RunFolder:
    return RunFolder.create(str(tmp_path) if request.param == "local" else f"{bucket}/run")


def lock_of(folder: RunFolder, time: Time, said: list[str] | None = None) -> RunLock:
    say = (lambda text: None) if said is None else said.append
    return RunLock(folder, print_message=say, clock=time.clock, sleep=time.sleep)


def test_live_local_owner_raises_immediately(folder: RunFolder) -> None:
    time = Time()
    refused = r"is in use by process \d+ on .*, since 20"
    with lock_of(folder, time), pytest.raises(UserError, match=refused):
        lock_of(folder, time).__enter__()
    assert time.now == 100.0


def test_released_folder_is_free_immediately(folder: RunFolder) -> None:
    time, said = Time(), list[str]()
    for _ in range(3):
        with lock_of(folder, time, said):
            pass
    assert (time.now, said) == (100.0, [])
    assert lease_store(folder.lease_folder).numbers() == []


def test_live_remote_owner_is_detected_by_its_renewals(folder: RunFolder) -> None:
    store = lease_store(folder.lease_folder)
    store.create(1, ELSEWHERE)
    lease = [ELSEWHERE]

    def renew() -> None:
        if time.now > 104:
            lease[0] = lease[0].renewed()
            store.replace(1, lease[0])

    time, said = Time(renew), list[str]()
    with pytest.raises(UserError, match="in use by process 4121 on node7, since 2026-11-23"):
        lock_of(folder, time, said).__enter__()
    assert time.now == 105.0
    assert len(said) == 1
    assert "within 60 s" in said[0]


def test_dead_remote_owner_is_replaced_after_a_minute(folder: RunFolder) -> None:
    store = lease_store(folder.lease_folder)
    store.create(7, ELSEWHERE)
    time = Time()
    with lock_of(folder, time) as lock:
        assert time.now == 100.0 + LEASE_SECONDS
        assert store.numbers() == [8]
        lock.verify_ownership()
    assert store.numbers() == []


def test_one_of_two_waiting_processes_takes_over(folder: RunFolder) -> None:
    store = lease_store(folder.lease_folder)
    store.create(7, ELSEWHERE)
    faster = dataclasses.replace(ELSEWHERE, token="faster", host="node8")
    time = Time()
    end = time.now + LEASE_SECONDS

    class Late:
        """Store that shows the other's lease only after its own is written."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def create(self, number: int, lease: Lease) -> bool:
            store.create(number, faster)
            return store.create(number, lease)

    late: LeaseStore = Late()  # type: ignore[assignment]
    lock = RunLock(folder, print_message=print, store=late, clock=time.clock, sleep=time.sleep)
    with pytest.raises(UserError, match="in use by process 4121 on node8"):
        lock.__enter__()
    assert time.now == end
    assert store.read(8) == faster


def test_replaced_owner_notices_before_saving(folder: RunFolder) -> None:
    time = Time()
    with lock_of(folder, time) as lock:
        lock.verify_ownership()
        lease_store(folder.lease_folder).create(2, ELSEWHERE)
        lock.check_ownership()  # within its lease, steps read nothing
        with pytest.raises(UserError, match=r"was taken over by process 4121 on node7.*saves noth"):
            lock.verify_ownership()
        with pytest.raises(UserError, match="was taken over"):
            lock.check_ownership()
    # It does not release another owner's lease.
    assert lease_store(folder.lease_folder).read(2) == ELSEWHERE


def test_owner_renews_its_lease_in_the_background(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.run_folder.lock.RENEW_INTERVAL_SECONDS", 0.01)
    store = lease_store(folder.lease_folder)
    with lock_of(folder, Time()):
        end = monotonic() + 60
        while (lease := store.read(1) or Lease()).renewals < 3:
            assert monotonic() < end, lease
            sleep(0.01)


def test_suspended_owner_checks_immediately_after_waking(folder: RunFolder) -> None:
    time = Time()
    with lock_of(folder, time) as lock:
        lease_store(folder.lease_folder).create(2, ELSEWHERE)
        time.now += 3600
        with pytest.raises(UserError, match="was taken over"):
            lock.check_ownership()


@pytest.mark.parametrize("text", ['{"token": 5}', "{", '{"no": 1}', "[" * 100_000])
def test_damaged_lease_file_is_waited_for(tmp_path: Path, text: str) -> None:
    folder = RunFolder.create(str(tmp_path))
    folder.lease_folder.mkdir()
    (folder.lease_folder / "3.json").write_text(text)
    time = Time()
    with lock_of(folder, time):
        assert time.now == 100.0 + LEASE_SECONDS


def test_removed_lease_files_are_rewritten(folder: RunFolder) -> None:
    store = lease_store(folder.lease_folder)
    with lock_of(folder, Time()) as lock:
        store.remove(1)
        lock.verify_ownership()
        assert store.numbers() == [1]


def test_suspended_owner_does_not_reclaim_a_finished_run(folder: RunFolder) -> None:
    """The new owner has finished and removed its lease."""
    store, time = lease_store(folder.lease_folder), Time()
    with lock_of(folder, time) as lock:
        store.remove(1)
        time.now += 3600
        with pytest.raises(UserError, match="was taken over by another process"):
            lock.check_ownership()
    assert store.numbers() == []


def test_owner_may_finish_while_another_waits(folder: RunFolder) -> None:
    store = lease_store(folder.lease_folder)
    store.create(5, ELSEWHERE)
    time = Time(lambda: store.remove(5))
    with lock_of(folder, time):
        assert time.now == 101.0
        assert store.numbers() == [1]


def test_liveness_of_an_owner() -> None:
    mine = new_lease()
    if not machine_id():
        pytest.skip("no /proc here")
    sleeper = [sys.executable, "-c", "import time; time.sleep(100)"]
    with subprocess.Popen(sleeper) as process:
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other_owner = dataclasses.replace(mine, token="a", process=process.pid, started=ticks)
        assert owner_state(other_owner) == "alive"
        assert owner_state(dataclasses.replace(other_owner, started="1")) == "gone"
        assert owner_state(dataclasses.replace(other_owner, machine="another")) == "unknown"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is reaped
        assert owner_state(other_owner) == "gone"
    assert owner_state(other_owner) == "gone"
    assert owner_state(Lease()) == "unknown"


def test_unreleased_lease_is_forgotten() -> None:
    if not machine_id():
        pytest.skip("no /proc here")
    assert owner_state(new_lease()) == "gone"


def _take(path: str, barrier: object, outcome: object) -> None:
    lease = new_lease()
    barrier.wait()  # type: ignore[attr-defined]
    outcome.put(lease_store(Path(path)).create(1, lease))  # type: ignore[attr-defined]


def test_one_of_several_processes_gets_a_lease_number(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, outcome = spawn.Barrier(3), spawn.Queue()
    processes = [
        spawn.Process(target=_take, args=(str(tmp_path), barrier, outcome)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    taken = [outcome.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(taken) == [False, False, True]


def test_killed_local_run_is_taken_over_immediately(tmp_path: Path) -> None:
    """Another process on this machine need not wait until the lease expires."""
    hold = (
        "import sys, time\n"
        "from train.run_folder.lock import RunLock\n"
        "from train.run_folder.folder import RunFolder\n"
        "lock = RunLock(RunFolder.create(sys.argv[1]), print_message=print).__enter__()\n"
        "print('held', flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        folder, time = RunFolder.create(str(tmp_path)), Time()
        with pytest.raises(UserError, match=f"in use by process {other.pid} on"):
            lock_of(folder, time).__enter__()
        other.send_signal(signal.SIGKILL)
        other.wait()
        with lock_of(folder, time):
            assert time.now == 100.0
