"""Progress of long work: what a terminal shows, what a log file gets, and when nothing is shown."""

import io
import threading

import pytest
from rich.console import Console

from train.telemetry import stages
from train.telemetry.progress import ProgressBar
from train.telemetry.stages import Stage, show_stages, stage, track


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_follows_from_the_amount_of_work() -> None:
    clock = Clock()
    progress = Stage("tokenizing train", total=200, clock=clock)
    assert progress.line() == "tokenizing train  0%  0:00:00 elapsed"
    progress.advance(50)
    clock.now = 30
    assert progress.line() == "tokenizing train  25%  0:00:30 elapsed, 0:01:30 left"
    assert progress.brief() == "tokenizing train 25%, 0:01:30 left"
    progress.advance(500)  # an estimate that was too low
    assert progress.line() == "tokenizing train  100%  0:00:30 elapsed, 0:00:00 left"


def test_time_left_follows_from_the_expected_seconds() -> None:
    clock = Clock()
    progress = Stage("compiling", expected_seconds=40, clock=clock)
    clock.now = 10
    assert progress.line() == "compiling  25%  0:00:10 elapsed, about 0:00:30 left"
    clock.now = 50
    assert progress.line() == "compiling  100%  0:00:50 elapsed, about 0:00:00 left"


def test_work_of_unknown_amount_has_no_time_left() -> None:
    clock = Clock()
    progress = Stage("reading text for the tokenizer", total=10, clock=clock)
    progress.advance(10)
    progress.rename("training the tokenizer")
    clock.now = 61
    assert progress.line() == "training the tokenizer  0:01:01 elapsed"


def test_without_a_display_no_output_and_no_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(threading.enumerate())
    with stage("evaluating") as progress, show_stages(quiet=True), stage("tokenizing"):
        progress.advance()
        assert set(threading.enumerate()) <= before
    assert list(track(range(3), "evaluating")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def wait_until_drawn(text: str, file: io.StringIO) -> None:
    """Wait until a display has drawn a text."""
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


@pytest.mark.usefixtures("instant")
def test_log_file_gets_a_line_at_intervals_and_at_the_end() -> None:
    file = io.StringIO()
    with show_stages(console=Console(file=file)), stage("tokenizing train", total=4) as progress:
        progress.advance()
        wait_until_drawn("tokenizing train", file)
    first, last, rest = file.getvalue().split("\n")
    assert first.startswith("tokenizing train  25%  0:00:00 elapsed, ")
    assert (last, rest) == ("tokenizing train  done in 0:00:00", "")
    assert "\r" not in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_short_work_prints_no_line() -> None:
    file = io.StringIO()
    with show_stages(console=Console(file=file)), stage("restoring checkpoint 5"):
        pass
    assert file.getvalue() == ""


@pytest.mark.usefixtures("instant")
def test_terminal_bar_is_erased_at_the_end() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with show_stages(console=console):
        with stage("compiling the training step"):
            wait_until_drawn("compiling the training step", file)
        with stage("evaluating", total=2) as progress:
            progress.advance()
            wait_until_drawn("50%", file)
    assert "\x1b[2K" in file.getvalue()  # the line is erased


@pytest.mark.usefixtures("instant")
def test_innermost_stage_is_shown() -> None:
    file = io.StringIO()
    with show_stages(console=Console(file=file)), stage("outer work"), stage("inner work"):
        wait_until_drawn("inner work", file)
        assert "outer" not in file.getvalue()


@pytest.mark.usefixtures("instant")
def test_inner_stage_that_was_not_drawn_leaves_the_outer_bar() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    display = stages.ConsoleDisplay(console)
    with stages.use_display(display), stage("outer work"):
        wait_until_drawn("outer work", file)
        bar = display._bar
        display.end(Stage("inner work"))
        assert display._bar is bar
    assert display._bar is None


@pytest.mark.usefixtures("instant")
def test_evaluation_during_training_is_shown_in_the_bar() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with ProgressBar(10, description="tiny", console=console) as bar:
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
def test_evaluation_during_training_has_lines_in_a_log() -> None:
    file = io.StringIO()
    with ProgressBar(10, console=Console(file=file)), stage("evaluating", total=4):
        wait_until_drawn("evaluating  0%", file)
    assert file.getvalue().endswith("evaluating  done in 0:00:00\n")
