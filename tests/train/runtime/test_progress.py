import io
import sys

import pytest
from rich.console import Console

from tests.train.telemetry.clock import Clock
from train.runtime.progress import LINE_INTERVAL_SECONDS, ProgressBar
from train.runtime.stages import format_clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal(*, quiet: bool = False, width: int = 120) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        quiet=quiet,
        _environ={"TERM": "xterm"},
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_are_printed_without_a_terminal(log: Console, clock: Clock) -> None:
    with ProgressBar(200, description="tiny", console=log, clock=clock) as progress:
        clock.now += 4
        progress.update(10, loss=3.25, tokens_per_second=12345.6)
        clock.now += LINE_INTERVAL_SECONDS - 1
        progress.update(20, loss=3.0, tokens_per_second=12000.0)
        clock.now += 1
        progress.update(50, loss=float("nan"))
        progress.update(200)  # the last step is always printed
    assert shown(log).splitlines() == [
        "tiny  10/200  loss 3.2500  12,346 tokens/s  0:00:04 elapsed, 0:01:16 left",
        "tiny  50/200  loss nan  12,000 tokens/s  0:00:34 elapsed, 0:01:42 left",
        "tiny  200/200  loss nan  12,000 tokens/s  0:00:34 elapsed, 0:00:00 left",
    ]


def test_time_left_ignores_compilation(log: Console, clock: Clock) -> None:
    with ProgressBar(101, console=log, clock=clock) as progress:
        clock.now += 7  # the data are opened
        with progress.leave_out_step(1):
            clock.now += 13  # the first step compiles
        clock.now += 5
        progress.update(11)
        clock.now += 20
        with progress.leave_out_step(32):  # and so does the first one of another batch shape
            clock.now += 30
        progress.update(52)
        clock.now += 24.5
        progress.update(101)
    assert shown(log).splitlines() == [
        "train  11/101  0:00:25 elapsed, 0:00:45 left",
        "train  52/101  0:01:15 elapsed, 0:00:24 left",
        "train  101/101  0:01:40 elapsed, 0:00:00 left",
    ]


def test_time_left_ignores_steps_before_a_resume_and_those_of_a_rollback(
    log: Console, clock: Clock
) -> None:
    with ProgressBar(1000, initial_step=900, console=log, clock=clock) as progress:
        progress.update(900)
        clock.now += LINE_INTERVAL_SECONDS
        progress.update(930)
        progress.update(880)
        clock.now += LINE_INTERVAL_SECONDS
        progress.update(910)
    assert shown(log).splitlines() == [
        "train  900/1000  0:00:00 elapsed, ? left",
        "train  930/1000  0:00:30 elapsed, 0:01:10 left",
        "train  910/1000  0:01:00 elapsed, 0:01:30 left",
    ]


def test_terminal_shows_a_progress_bar(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    with ProgressBar(200, description="tiny", console=console, clock=clock) as progress:
        clock.now += 10
        progress.update(50, loss=3.25, tokens_per_second=12345.6)
        progress.print("validation loss 3.5")
        print("for the next program")
    assert capsys.readouterr().out == "for the next program\n"
    text = shown(console)
    [*_, last] = [line for line in text.splitlines() if "/200" in line]
    for part in ("tiny", "50/200", "loss 3.2500", "12,346 tokens/s", "0:00:10"):
        assert part in last
    assert text.index("validation loss 3.5") < text.rindex("50/200")
    assert "\x1b[?25h" in text  # the cursor is shown again


@pytest.mark.parametrize("width", [80, 40])
def test_narrow_terminal_shows_the_time_left(clock: Clock, width: int) -> None:
    console = terminal(width=width)
    name = "transformer_base"
    with ProgressBar(100_000, description=name, console=console, clock=clock) as progress:
        clock.now += 3600
        progress.update(50_000, loss=3.25, tokens_per_second=123456.7)
    [*_, last] = [line for line in shown(console).splitlines() if name in line]
    assert "1:00:00 left" in last


def test_text_is_shown_without_terminal_commands(log: Console) -> None:
    text = "[bold]x[/bold] :smile: " + "long " * 20 + "\x1b]0;owned\x07\x9b2J\r\n\tü"
    with ProgressBar(1, console=log) as progress:
        progress.print(text)
    safe = "[bold]x[/bold] :smile: " + "long " * 20 + "␛]0;owned␇\ufffd2J␍\n        ü\n"
    assert shown(log) == safe


def test_quiet_shows_nothing_and_standard_output_stays_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = terminal(quiet=True)
    for options, lines in (({"console": quiet}, 0), ({"quiet": True}, 0), ({}, 2)):
        with ProgressBar(2, **options) as progress:
            progress.update(2, loss=0.5)
            progress.print("said")
        captured = capsys.readouterr()
        assert (captured.out, len(captured.err.splitlines())) == ("", lines)
    assert shown(quiet) == ""


def test_format_of_durations() -> None:
    durations = ["0:00:00", "0:01:00", "0:59:59", "25:01:01"]
    assert [format_clock(s) for s in (0, 59.6, 3599, 90061)] == durations


class Broken(io.TextIOBase):
    """Stream that fails to write, like a closed pipe or a full disk."""

    def __init__(self, error: Exception):
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("closed file")])
def test_unwritable_standard_error_does_not_end_a_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Broken(error))
    with ProgressBar(10) as progress:
        progress.update(1, loss=2.0)
        progress.print("a sample")
        progress.update(10, loss=1.0)
