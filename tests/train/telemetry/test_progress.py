import io
import subprocess
import sys

import pytest
from rich.console import Console

from train.telemetry.progress import LINE_INTERVAL_SECONDS, ProgressBar
from train.telemetry.stages import format_clock


class Clock:
    """Clock that advances only when the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_are_printed_without_a_terminal() -> None:
    console, clock = plain(), Clock()
    with ProgressBar(200, description="tiny", console=console, clock=clock) as progress:
        clock.now += 4
        progress.update(10, loss=3.25, tokens_per_second=12345.6)
        clock.now += LINE_INTERVAL_SECONDS - 1
        progress.update(20, loss=3.0, tokens_per_second=12000.0)
        clock.now += 1
        progress.update(50, loss=2.5)
    assert shown(console).splitlines() == [
        "tiny  10/200  loss 3.2500  12,346 tokens/s  0:00:04 elapsed, 0:01:16 left",
        "tiny  50/200  loss 2.5000  12,000 tokens/s  0:00:34 elapsed, 0:01:42 left",
    ]


def test_last_step_is_always_printed() -> None:
    console, clock = plain(), Clock()
    with ProgressBar(3, console=console, clock=clock) as progress:
        for step in (1, 2, 3):
            clock.now += 1
            progress.update(step, loss=float("nan"))
    assert shown(console).splitlines() == [
        "train  1/3  loss nan  0:00:01 elapsed, 0:00:02 left",
        "train  3/3  loss nan  0:00:03 elapsed, 0:00:00 left",
    ]


def test_time_left_ignores_compilation() -> None:
    console, clock = plain(), Clock()
    with ProgressBar(101, console=console, clock=clock) as progress:
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
    assert shown(console).splitlines() == [
        "train  11/101  0:00:25 elapsed, 0:00:45 left",
        "train  52/101  0:01:15 elapsed, 0:00:24 left",
        "train  101/101  0:01:40 elapsed, 0:00:00 left",
    ]


def test_time_left_after_a_rollback() -> None:
    console, clock = plain(), Clock()
    with ProgressBar(1000, initial_step=900, console=console, clock=clock) as progress:
        clock.now += LINE_INTERVAL_SECONDS
        progress.update(930)
        progress.update(880)
        clock.now += LINE_INTERVAL_SECONDS
        progress.update(910)
    assert shown(console).splitlines()[-1] == "train  910/1000  0:01:00 elapsed, 0:01:30 left"


def test_time_left_ignores_steps_before_a_resume() -> None:
    console, clock = plain(), Clock()
    with ProgressBar(1000, initial_step=900, console=console, clock=clock) as progress:
        progress.update(900)
        clock.now += LINE_INTERVAL_SECONDS
        progress.update(910)
    assert shown(console).splitlines() == [
        "train  900/1000  0:00:00 elapsed, ? left",
        "train  910/1000  0:00:30 elapsed, 0:04:30 left",
    ]


def terminal(*, quiet: bool = False, width: int = 120) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        quiet=quiet,
        _environ={"TERM": "xterm"},
    )


def test_terminal_shows_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    console, clock = terminal(), Clock()
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


@pytest.mark.parametrize("width", [80, 60, 40])
def test_narrow_terminal_shows_the_time_left(width: int) -> None:
    console, clock = terminal(width=width), Clock()
    name = "transformer_base"
    with ProgressBar(100_000, description=name, console=console, clock=clock) as progress:
        clock.now += 3600
        progress.update(50_000, loss=3.25, tokens_per_second=123456.7)
    [*_, last] = [line for line in shown(console).splitlines() if name in line]
    assert "1:00:00 left" in last


def test_text_is_shown_without_terminal_commands() -> None:
    console = plain()
    text = "[bold]x[/bold] :smile: " + "long " * 20 + "\x1b]0;owned\x07\x9b2J\r\n\tü"
    with ProgressBar(1, console=console) as progress:
        progress.print(text)
    safe = "[bold]x[/bold] :smile: " + "long " * 20 + "␛]0;owned␇\ufffd2J␍\n        ü\n"
    assert shown(console) == safe


def test_quiet_shows_nothing_in_a_terminal() -> None:
    console = terminal(quiet=True)
    with ProgressBar(2, console=console) as progress:
        progress.update(1, loss=0.5)
        progress.print("said")
    assert shown(console) == ""


def test_quiet_leaves_standard_output_empty() -> None:
    program = (
        "import sys\n"
        "from train.telemetry.progress import ProgressBar\n"
        "with ProgressBar(1, quiet=sys.argv[1] == 'quiet') as progress:\n"
        "    progress.update(1, loss=0.5)\n"
        "    progress.print('said')\n"
    )
    for mode, lines in (("quiet", 0), ("loud", 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, mode], capture_output=True, text=True, check=True
        )
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == lines


def test_format_of_durations() -> None:
    assert [format_clock(s) for s in (0, 59.6, 3599, 90061)] == [
        "0:00:00",
        "0:01:00",
        "0:59:59",
        "25:01:01",
    ]


class Broken(io.TextIOBase):
    """Stream that fails to write, like a closed pipe or a full disk."""

    def __init__(self, error: Exception):
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left"), ValueError("closed file")],
    ids=["pipe", "disk", "closed"],
)
def test_unwritable_standard_error_is_ignored(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Broken(error))
    with ProgressBar(10) as progress:
        progress.update(1, loss=2.0)
        progress.print("a sample")
        progress.update(10, loss=1.0)
