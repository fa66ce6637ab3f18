"""Heartbeats with a fake store and clock; real processes are in test_distributed.py."""

import time

import pytest
from jax.errors import JaxRuntimeError

from train.parallel.heartbeats import Heartbeats


class Store:
    """Key-value store of process 0."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.gone = False

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if self.gone:
            raise JaxRuntimeError("UNAVAILABLE: socket closed")
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        if self.gone:
            raise JaxRuntimeError("UNAVAILABLE: socket closed")
        return [item for item in self.values.items() if item[0].startswith(f"{key}/")]


class Run:
    """Processes whose threads are not started: the test sends each heartbeat."""

    def __init__(self, count: int) -> None:
        self.store, self.now = Store(), 0.0
        self.ended: list[str] = []
        self.processes = [
            Heartbeats(
                self.store,
                index,
                self.ended.append,
                interval=0.01,
                timeout=60.0,
                clock=lambda: self.now,
            )
            for index in range(count)
        ]

    def beat(self, *indices: int) -> list[str | None]:
        return [self.processes[index].beat() for index in indices]


def test_no_process_ends_while_all_beat() -> None:
    run = Run(3)
    for _ in range(100):
        run.now += 50
        assert run.beat(2, 1, 0) == [None] * 3


def test_silent_process_ends_the_others() -> None:
    run = Run(3)
    run.beat(2, 1, 0)
    for _ in range(2):
        run.now += 30
        assert run.beat(1, 0) == [None] * 2
    run.now += 1
    assert run.beat(1) == [None]  # process 0 must see it first
    word = "process 2 has not been heard of for 60 s"
    assert run.beat(0, 1) == [word] * 2


def test_failing_process_reports_why_and_ends_the_others() -> None:
    run = Run(3)
    run.beat(0, 1, 2)
    run.processes[1].announce_exit("disk full: make room")
    assert run.beat(2, 0) == ["process 1 has ended (disk full: make room)"] * 2


def test_finished_process_is_not_missed() -> None:
    run = Run(2)
    run.beat(0, 1)
    run.processes[1].stop()
    run.now += 1000
    assert run.beat(0) == [None]


def test_heartbeat_under_way_does_not_undo_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(2)
    run.beat(0, 1)
    set_value, process = run.store.key_value_set, run.processes[1]

    def stop_first(key: str, value: str, allow_overwrite: bool = False) -> None:
        monkeypatch.undo()
        process.stop()  # the other thread, between this request and its arrival
        set_value(key, value, allow_overwrite)

    monkeypatch.setattr(run.store, "key_value_set", stop_first)
    run.beat(1)
    run.beat(0)
    run.now += 1000
    assert run.beat(0) == [None]


def test_unreachable_process_0_ends_the_others() -> None:
    run = Run(2)
    run.beat(0, 1)
    run.store.gone = True
    run.now += 59
    assert run.beat(1) == [None]
    run.now += 2
    assert run.beat(1) == ["process 0 has not answered for 60 s"]
    run.processes[1].stop()  # no store to report to, which is not an error


def test_process_0_waits_for_the_others_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(2)
    run.beat(0, 1)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.processes[1].stop()

    monkeypatch.setattr(time, "sleep", sleep)
    run.processes[0].announce_exit("disk full")
    assert len(slept) == 3


def test_process_0_stops_waiting_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(2)
    run.beat(0, 1)

    def sleep(seconds: float) -> None:
        run.now += 1

    monkeypatch.setattr(time, "sleep", sleep)
    run.processes[0].announce_exit("disk full", wait_seconds=6)
    assert run.now == 6


def test_thread_ends_its_process_once() -> None:
    run = Run(2)
    run.processes[1].announce_exit("disk full")
    run.processes[0].start()
    run.processes[0]._thread.join(timeout=60)
    assert run.ended == ["process 1 has ended (disk full)"]
