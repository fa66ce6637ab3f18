"""Progress of long work: what a terminal shows, what a log file gets, and when nothing is shown."""

import io
import threading

import pytest
from rich.console import Console

from tests.train.telemetry.clock import Clock
from train.runtime import stages
from train.runtime.progress import ProgressBar
from train.runtime.stages import Display, format_clock, line_of, show_stages, stage, track


def test_line_shows_the_work_done_and_the_time_left() -> None:
    clock = Clock()
    display = Display(Console(file=io.StringIO(), quiet=True), clock=clock)
    with display.show("tokenizing train", total=200) as progress:
        [task] = display.bars.tasks
        assert line_of(task) == "tokenizing train  0%  0:00:00 elapsed, ? left"
        progress.advance(10)
        clock.now += 30
        progress.advance(40)
        assert line_of(task) == "tokenizing train  25%  0:00:30 elapsed, 0:01:53 left"
        progress.rename("training the tokenizer")  # of unknown amount
        [task] = display.bars.tasks
        clock.now += 31
        assert line_of(task) == "training the tokenizer  0:00:31 elapsed"
        assert progress.elapsed == 61


def test_format_of_durations() -> None:
    durations = ["0:00:00", "0:01:00", "0:59:59", "25:01:01"]
    assert [format_clock(s) for s in (0, 59.6, 3599, 90061)] == durations


def test_without_a_display_no_output_and_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    with stage("evaluating") as progress, show_stages(quiet=True), stage("tokenizing"):
        progress.advance()
        assert set(threading.enumerate()) <= before
    assert list(track(range(3), "evaluating")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def wait_until_drawn(text: str, file: io.StringIO) -> None:
    patience = threading.Event()
    for _ in range(1000):
        if text in file.getvalue():
            return
        patience.wait(0.01)
    pytest.fail(f"{text!r} is not in {file.getvalue()[:500]!r}")


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FIRST_LINE_SECONDS", 0.02)
    monkeypatch.setattr(stages, "LINE_INTERVAL_SECONDS", 600.0)
    monkeypatch.setattr(stages, "BAR_DELAY_SECONDS", 0.01)


@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def terminal(file: io.StringIO) -> Console:
    return Console(file=file, force_terminal=True, width=100, _environ={"TERM": "xterm"})


@pytest.mark.usefixtures("instant")
def test_log_file_gets_a_line_at_intervals_and_at_the_end(file: io.StringIO) -> None:
    with show_stages(console=Console(file=file)), stage("tokenizing train", total=4) as progress:
        progress.advance()
        wait_until_drawn("tokenizing train", file)
    first, last, rest = file.getvalue().split("\n")
    assert first.startswith("tokenizing train  25%  0:00:00 elapsed, ")
    assert (last, rest) == ("tokenizing train  done in 0:00:00", "")
    assert not {"\r", "\x1b"} & set(file.getvalue())


def test_short_work_shows_nothing(file: io.StringIO, terminal: Console) -> None:
    for console in (Console(file=file), terminal):
        with show_stages(console=console), stage("restoring checkpoint 5"):
            pass
    assert file.getvalue() == ""


@pytest.mark.usefixtures("instant")
def test_terminal_bar_is_erased_at_the_end(file: io.StringIO, terminal: Console) -> None:
    with show_stages(console=terminal):
        with stage("compiling the training step", expected_seconds=65):
            wait_until_drawn("took 0:01:05 before", file)
        with stage("evaluating", total=2) as progress:
            progress.advance()
            wait_until_drawn("50%", file)
    assert file.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is erased


@pytest.mark.usefixtures("instant")
def test_innermost_stage_has_lines(file: io.StringIO) -> None:
    with show_stages(console=Console(file=file)), stage("outer work"), stage("inner work"):
        wait_until_drawn("inner work", file)
        assert "outer" not in file.getvalue()


@pytest.mark.usefixtures("instant")
def test_evaluation_during_training_is_shown_below_the_bar(
    file: io.StringIO, terminal: Console
) -> None:
    with ProgressBar(10, description="tiny", console=terminal) as bar:
        bar.update(5, "5/10  loss 3.2500")
        with stage("evaluating", total=4) as progress:
            progress.advance()
            wait_until_drawn("25%", file)
        file.seek(0)
        file.truncate()
        bar.update(6)
        wait_until_drawn("loss 3.2500", file)
        assert "evaluating" not in file.getvalue()
    with stage("evaluating"):  # the bar is not a display any more
        assert len(bar.bars.tasks) == 1


@pytest.mark.usefixtures("instant")
def test_evaluation_during_training_has_lines_in_a_log(file: io.StringIO) -> None:
    with ProgressBar(10, console=Console(file=file)), stage("evaluating", total=4):
        wait_until_drawn("evaluating  0%", file)
    assert file.getvalue().endswith("evaluating  done in 0:00:00\n")
