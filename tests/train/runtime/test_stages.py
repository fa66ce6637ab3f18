"""Progress of long work: what a terminal shows, what a log file gets, and when nothing is shown."""

import io
import threading

import pytest
from rich.console import Console

from tests.train.telemetry.clock import Clock
from train.runtime import stages
from train.runtime.progress import ProgressBar
from train.runtime.stages import Stage, show_stages, stage, track


def test_time_left_follows_from_the_amount_of_work_or_the_expected_seconds() -> None:
    clock = Clock()
    counted = Stage("tokenizing train", total=200, clock=clock)
    expected = Stage("compiling", expected_seconds=40, clock=clock)
    assert counted.line() == "tokenizing train  0%  0:00:00 elapsed"
    counted.advance(50)
    clock.now += 30
    assert counted.line() == "tokenizing train  25%  0:00:30 elapsed, 0:01:30 left"
    assert counted.brief() == "tokenizing train 25%, 0:01:30 left"
    assert expected.line() == "compiling  75%  0:00:30 elapsed, about 0:00:10 left"
    counted.advance(500)  # an estimate that was too low
    clock.now += 31
    assert counted.line() == "tokenizing train  100%  0:01:01 elapsed, 0:00:00 left"
    assert expected.line() == "compiling  100%  0:01:01 elapsed, about 0:00:00 left"
    counted.rename("training the tokenizer")  # of unknown amount
    assert counted.line() == "training the tokenizer  0:01:01 elapsed"


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
    pytest.fail(f"{text!r} is not in {file.getvalue()!r}")


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FIRST_LINE_SECONDS", 0.02)
    monkeypatch.setattr(stages, "LINE_INTERVAL_SECONDS", 600.0)
    monkeypatch.setattr(stages.TickingDisplay, "first_seconds", 0.01)


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


def test_short_work_prints_no_line(file: io.StringIO) -> None:
    with show_stages(console=Console(file=file)), stage("restoring checkpoint 5"):
        pass
    assert file.getvalue() == ""


@pytest.mark.usefixtures("instant")
def test_terminal_bar_is_erased_at_the_end(file: io.StringIO, terminal: Console) -> None:
    with show_stages(console=terminal):
        with stage("compiling the training step"):
            wait_until_drawn("compiling the training step", file)
        with stage("evaluating", total=2) as progress:
            progress.advance()
            wait_until_drawn("50%", file)
    assert "\x1b[2K" in file.getvalue()  # the line is erased


@pytest.mark.usefixtures("instant")
def test_innermost_stage_is_shown(file: io.StringIO) -> None:
    with show_stages(console=Console(file=file)), stage("outer work"), stage("inner work"):
        wait_until_drawn("inner work", file)
        assert "outer" not in file.getvalue()


@pytest.mark.usefixtures("instant")
def test_inner_stage_that_was_not_drawn_leaves_the_outer_bar(
    file: io.StringIO, terminal: Console
) -> None:
    display = stages.ConsoleDisplay(terminal)
    with stages.use_display(display), stage("outer work"):
        wait_until_drawn("outer work", file)
        bar = display._bar
        display.end(Stage("inner work"))
        assert display._bar is bar
    assert display._bar is None


@pytest.mark.usefixtures("instant")
def test_evaluation_during_training_is_shown_in_the_bar(
    file: io.StringIO, terminal: Console
) -> None:
    with ProgressBar(10, description="tiny", console=terminal) as bar:
        bar.update(5, loss=3.25, tokens_per_second=100)
        with stage("evaluating", total=4) as progress:
            progress.advance()
            wait_until_drawn("evaluating 25%", file)
        file.seek(0)
        file.truncate()
        bar.update(6)
        wait_until_drawn("loss 3.2500", file)
        assert "evaluating" not in file.getvalue()
    with stage("evaluating"):  # the bar is not a display any more
        pass


@pytest.mark.usefixtures("instant")
def test_evaluation_during_training_has_lines_in_a_log(file: io.StringIO) -> None:
    with ProgressBar(10, console=Console(file=file)), stage("evaluating", total=4):
        wait_until_drawn("evaluating  0%", file)
    assert file.getvalue().endswith("evaluating  done in 0:00:00\n")
