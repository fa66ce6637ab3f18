"""Processes of a measurement: their results, and their error messages."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.contender import Contender, interpreter, running
from train.errors import UserError

# Counts its steps, and reports the count as its loss.
COUNTER = """
import itertools
from bench.protocol import Work, serve

def build(settings):
    print("a library that prints")
    steps = itertools.count(1)
    return Work(lambda k: [next(steps) for _ in range(k)][-1], {"counter": "7"}, {"parameters": 3})

serve(build)
"""

# Holds the given number of bytes until it exits.
KEEPER = """
from bench.protocol import Work, serve

def build(settings):
    kept = bytearray(b"x") * settings["bytes"]
    return Work(lambda k: len(kept))

serve(build)
"""


def contender(code: str, **settings: Any) -> Contender:
    return Contender("racer", (sys.executable, "-c", code), settings)


def test_contender_reports_every_turn() -> None:
    with running(contender(COUNTER), warmup=2) as runner:
        runner.wait_until_ready()
        runner.turn(3)
        runner.turn(5)
        record = runner.finish()
    assert list(record.losses) == [5, 10]
    assert len(record.seconds) == 2
    assert all(seconds > 0 for seconds in record.seconds)
    assert record.build_seconds > 0
    assert record.versions == {"counter": "7"}
    assert record.facts == {"parameters": 3}


def test_peak_memory_excludes_the_parent() -> None:
    size = 1 << 26
    held = bytearray(b"x") * 3 * size  # memory of the parent must not be counted
    peaks = []
    for kept in (1, size):
        with running(contender(KEEPER, bytes=kept), warmup=1) as runner:
            runner.wait_until_ready()
            peaks.append(runner.finish().peak_memory_bytes)
    assert 0.9 * size < peaks[1] - peaks[0] < 1.1 * size
    assert peaks[1] < len(held)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "raise SystemExit('no such library')",
            "racer: ended early with status 1 (no such library",
        ),
        ("import os; os._exit(3)", "racer: ended early with status 3 (no message); to see all"),
    ],
    ids=["an error", "silence"],
)
def test_contender_that_cannot_start_is_named(code: str, words: str) -> None:
    with pytest.raises(UserError) as caught, running(contender(code), warmup=1) as runner:
        runner.wait_until_ready()
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_contender_that_exits_in_a_turn_is_named() -> None:
    code = """
import os
from bench.protocol import Work, serve
serve(lambda settings: Work(lambda steps: os._exit(4) if steps == 2 else None))
"""
    with running(contender(code), warmup=1) as runner:
        runner.wait_until_ready()
        runner.turn(1)
        with pytest.raises(UserError, match="status 4"):
            runner.turn(2)
        with pytest.raises(UserError, match="status 4"):
            runner.finish()


def test_contender_ends_with_the_measurement() -> None:
    started = []

    def interrupted() -> None:
        with running(contender(COUNTER), warmup=1) as runner:
            started.append(runner._process)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_interpreter_is_found_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert interpreter(Path("bin/python")) == str(link)
    monkeypatch.setenv("PATH", str(link.parent))
    assert interpreter(Path("python")) == str(link)
    with pytest.raises(UserError, match=r"^nowhere: is not a program"):
        interpreter(Path("nowhere"))
