import json
import pathlib
import time

import pytest

from tests.train.object_store import bucket as bucket
from tests.train.support import command
from tests.train.telemetry.clock import Clock
from train.run_folder.folder import RunFolder
from train.telemetry.goodput import (
    ActivityTimer,
    TimeLog,
    compute_goodput,
    format_duration,
    format_goodput,
    previous_resume_seconds,
    process_start_time,
    read_time_records,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_once(clock: Clock, folder: RunFolder, first: int, last: int) -> TimeLog:
    """Write one start of a run: 2 s to start, 1 to restore, 3 to compile, 1 a step, 5 a save."""
    timer = ActivityTimer(clock=clock)
    log = TimeLog(folder.time_log, timer, is_writer=True)
    clock.now += 2
    with timer.track("restore"):
        clock.now += 1
    log.start_compiling(first)
    clock.now += 3
    log.start_stepping(first + 1)
    for step in range(first + 2, last + 1):
        clock.now += 1
        log.record_step(step)
        if step % 10 == 0:
            with timer.track("save"):
                clock.now += 5
        log.write()
    return log


def test_repeated_steps_are_not_productive(clock: Clock, tmp_path: pathlib.Path) -> None:
    folder = RunFolder(tmp_path)
    assert previous_resume_seconds(folder.time_log) == 0
    run_once(clock, folder, 0, 15)
    clock.now += 7  # killed
    assert previous_resume_seconds(folder.time_log) == 0  # nothing was restored
    log = run_once(clock, folder, 10, 21)
    assert previous_resume_seconds(folder.time_log) == 1
    assert log.previous_seconds("compile") == 3
    result = log.compute_goodput()
    assert result.starts == 2
    assert result.seconds == {
        "step": 14 + 6,  # 2 to 15, and 16 to 21
        "replay": 4,  # 12 to 15
        "start": 4,
        "restore": 2,
        "compile": 6,
        "evaluate": 0,
        "save": 10,
        "recover": 0,
        "lost": 7,
    }
    assert result.total == clock.now - 1000
    assert result.of_processes == result.total - 7
    assert result.productive_fraction == pytest.approx(20 / 53)


def test_a_finished_run_that_is_extended_has_lost_no_time(
    clock: Clock, tmp_path: pathlib.Path
) -> None:
    folder = RunFolder(tmp_path)
    run_once(clock, folder, 0, 10).write(final=True, finished=True)
    clock.now += 86400
    run_once(clock, folder, 10, 15)
    clock.now += 7  # stopped
    result = run_once(clock, folder, 15, 20).compute_goodput()
    assert (result.starts, result.seconds["lost"]) == (3, 7)
    assert result.total == clock.now - 1000 - 86400


def test_rollback_repeats_steps(clock: Clock, tmp_path: pathlib.Path) -> None:
    log = run_once(clock, RunFolder(tmp_path), 0, 9)
    before = log.compute_goodput().seconds["step"]
    log.start_stepping(5)
    for step in range(6, 13):
        clock.now += 1
        log.record_step(step)
    seconds = log.compute_goodput().seconds
    assert seconds["replay"] == 4  # 6 to 9
    assert seconds["step"] - before == 3


def test_clock_that_was_set_back_loses_no_time() -> None:
    records = [
        {"began": 200_000, "now": 203_600, "step": 10, "seconds": {"step": 3600}},
        {"began": 110_000, "now": 113_600, "step": 20, "seconds": {"step": 3600}},
    ]
    assert compute_goodput([]).productive_fraction == 0.0
    found = compute_goodput(records)
    assert found.seconds["lost"] == 0
    assert found.seconds["step"] == 7200


def test_torn_line_is_skipped(clock: Clock, tmp_path: pathlib.Path) -> None:
    folder = RunFolder(tmp_path)
    full = run_once(clock, folder, 0, 4).compute_goodput()
    with folder.time_log.open("a") as file:
        file.write('{"began": 17')
    timer = ActivityTimer(start_time=clock.now, clock=clock)
    again = TimeLog(folder.time_log, timer, is_writer=True).compute_goodput()
    assert again.starts == 2
    assert again.seconds == full.seconds


def test_object_store_has_the_last_line(clock: Clock, bucket: str) -> None:
    folder = RunFolder.create(f"{bucket}/runs/first")
    log = run_once(clock, folder, 0, 9)
    assert len(read_time_records(folder.time_log)) == 1  # the line written at the start
    log.write(final=True)
    assert compute_goodput(read_time_records(folder.time_log)) == log.compute_goodput()


def test_only_one_process_writes(clock: Clock, tmp_path: pathlib.Path) -> None:
    log = TimeLog(RunFolder(tmp_path).time_log, ActivityTimer(clock=clock), is_writer=False)
    log.start_compiling(0)
    log.write()
    assert not RunFolder(tmp_path).time_log.exists()


def test_summary_is_one_line(clock: Clock, tmp_path: pathlib.Path) -> None:
    goodput = run_once(clock, RunFolder(tmp_path), 0, 9).compute_goodput()
    text = "time: 57% of 14 s went into training steps; start 14%, initialize 7%, compile 21%"
    assert format_goodput(goodput) == text
    assert [format_duration(x) for x in (4.23, 59.4, 60, 3599, 3600, 9000, 9e5)] == [
        "4.2 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "2 h 30 min",
        "10 days 10 h",
    ]


def test_process_start_time_is_in_the_past() -> None:
    began = process_start_time()
    assert 0 < time.time() - began < time.clock_gettime(time.CLOCK_MONOTONIC)
    assert began == pytest.approx(process_start_time(), abs=0.1)


def test_goodput_verb_prints_fractions(
    clock: Clock, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.config_json.write_text("{}")
    assert "is empty; fit" in command(capsys, "goodput", str(tmp_path)).error
    run_once(clock, folder, 0, 9)
    output = command(capsys, "goodput", str(tmp_path)).output
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "step 57.1% 8.0 s steps made for the first time" in rows
    assert "all 100.0% 14 s in 1 start" in rows
    assert "recover" not in output  # it took no time
    plain = json.loads(command(capsys, "goodput", str(tmp_path), "--json").output)
    assert (plain["starts"], plain["total"], plain["share"]) == (1, 14, 8 / 14)
