"""The description of the machine."""

import os

import pytest

from bench import machine


def test_machine_description() -> None:
    described = machine.machine()
    assert described["cores"] == len(os.sched_getaffinity(0))
    assert described["cpu"]
    assert described["system"]


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    [
        ([100.0, 106.0], 2.0, 0.5),  # other processes used 4 of 8 core seconds
        ([100.0, 102.0], 2.5, 0.0),  # the counters are coarse: the result is never negative
        ([100.0, 120.0], 2.0, 1.0),
        ([None, None], 2.0, None),
    ],
    ids=["half", "rounding", "all", "untold"],
)
def test_load_of_other_processes(
    busy: list[float | None],
    own: float,
    share: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings, clock = iter(busy), iter([10.0, 12.0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(readings))
    monkeypatch.setattr("bench.machine.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("bench.machine.os.cpu_count", lambda: 4)
    assert machine.Neighbours().share(own) == share


def test_busy_seconds_grow_with_work() -> None:
    before = machine._busy_seconds()
    sum(range(3_000_000))
    after = machine._busy_seconds()
    assert before is not None
    assert after is not None
    assert after >= before > 0
