import io
import sys

import pytest
from rich.console import Console

from tests.train.telemetry.clock import Clock
from train.runtime.progress import ProgressBar
from train.runtime.stages import LINE_INTERVAL_SECONDS


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
    with ProgressBar(200, description="tiny", console=log, clock=clock) as bar:
        clock.now += 2
        bar.update(1)  # after it compiled, which does not count for the time left
        clock.now += 4
        bar.update(11, "11/200  loss 3.2500")
        clock.now += LINE_INTERVAL_SECONDS - 1
        bar.update(20, "20/200  loss 3.0000")
        clock.now += 1
        bar.update(51, "51/200  loss nan")
        bar.update(200, "200/200  loss nan")  # the last step is always printed
    assert shown(log).splitlines() == [
        "tiny  11/200  loss 3.2500  0:00:06 elapsed, 0:01:16 left",
        "tiny  51/200  loss nan  0:00:36 elapsed, 0:01:42 left",
        "tiny  200/200  loss nan  0:00:36 elapsed, 0:00:00 left",
    ]


def test_time_left_ignores_steps_before_a_resume_and_those_of_a_rollback(
    log: Console, clock: Clock
) -> None:
    with ProgressBar(1000, completed=900, description="t", console=log, clock=clock) as bar:
        bar.update(901, "901")
        clock.now += LINE_INTERVAL_SECONDS
        bar.update(931, "931")
        bar.update(881)
        clock.now += LINE_INTERVAL_SECONDS
        bar.update(911, "911")
    assert shown(log).splitlines() == [
        "t  901  0:00:00 elapsed, ? left",
        "t  931  0:00:30 elapsed, 0:01:09 left",
        "t  911  0:01:00 elapsed, 0:01:29 left",
    ]


def test_terminal_shows_a_progress_bar(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    with ProgressBar(200, description="tiny", console=console, clock=clock) as bar:
        clock.now += 10
        bar.update(50, "50/200  loss 3.2500  12,346 tokens/s")
        bar.print("validation loss 3.5")
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
    with ProgressBar(100_001, description=name, console=console, clock=clock) as bar:
        bar.update(1)
        clock.now += 3600
        bar.update(50_001, "50001/100001  loss 3.2500  123,456.7 tokens/s")
    assert "1:00:00 left" in shown(console).splitlines()[-2]


def test_text_is_shown_without_terminal_commands(log: Console) -> None:
    text = "[bold]x[/bold] :smile: " + "long " * 20 + "\x1b]0;owned\x07\x9b2J\r\n\tü"
    with ProgressBar(1, console=log) as bar:
        bar.print(text)
    safe = "[bold]x[/bold] :smile: " + "long " * 20 + "␛]0;owned␇\ufffd2J␍\n        ü\n"
    assert shown(log) == safe


def test_quiet_shows_nothing_and_standard_output_stays_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = terminal(quiet=True)
    for options, lines in (({"console": quiet}, 0), ({"quiet": True}, 0), ({}, 2)):
        with ProgressBar(2, **options) as bar:
            bar.update(2, "2/2")
            bar.print("said")
        captured = capsys.readouterr()
        assert (captured.out, len(captured.err.splitlines())) == ("", lines)
    assert shown(quiet) == ""


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
    with ProgressBar(10) as bar:
        bar.update(1, "1/10")
        bar.print("a sample")
        bar.update(10, "10/10")
