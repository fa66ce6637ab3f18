"""Progress of long work outside the training steps: data, compilation, evaluation, checkpoints.

Code that does such work opens a `stage` and advances it. It does not know where progress is shown:
the display that a caller opened around it (`fit`, a verb) shows the stage, and without a display
nothing happens. So functions of data and evaluation stay silent in a program of the user's own.
"""

import abc
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from train.errors import printable
from train.runtime.startup import LenientStream

BAR_DELAY_SECONDS = 1.0
"""Time after which a stage is drawn on a terminal. Shorter ones would only flicker."""

FIRST_LINE_SECONDS = 10.0
"""Time after which a stage gets its first plain line, where no bar can be drawn."""

LINE_INTERVAL_SECONDS = 30.0
"""Time between plain lines of one stage."""

DRAW_INTERVAL_SECONDS = 0.5
"""Time between two drawings on a terminal."""

Item = TypeVar("Item")
"""Type variable: an element of a sequence."""


class Stage:
    """Work in progress: what it is, how much is done, and how long it takes."""

    def __init__(
        self,
        description: str,
        total: float = 0.0,
        expected_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begin the stage.

        Args:
          description: What is done, as in "tokenizing train".
          total: Amount of work, in any unit. 0: unknown.
          expected_seconds: Duration, for example of the same work before; used without a total.
          clock: Returns seconds from any origin.
        """
        self.description, self._total, self._expected = description, total, expected_seconds
        self._clock, self._began = clock, clock()
        self._done = 0.0

    def advance(self, amount: float = 1.0) -> None:
        """Count an amount of work as done."""
        self._done += amount

    def rename(self, description: str) -> None:
        """Continue with other work of unknown amount."""
        self.description, self._total, self._expected = description, 0.0, 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def fraction(self) -> float | None:
        """Fraction of the work that is done, at most 1. None: not known."""
        if self._total > 0:
            return min(self._done / self._total, 1.0)
        if self._expected > 0:
            return min(self.elapsed / self._expected, 1.0)
        return None

    def times_text(self) -> str:
        """Return the elapsed time and, if it can be estimated, the time left."""
        elapsed, fraction = self.elapsed, self.fraction
        text = f"{format_clock(elapsed)} elapsed"
        if self._total <= 0 and self._expected > 0:
            return f"{text}, about {format_clock(max(self._expected - elapsed, 0.0))} left"
        if fraction:
            text += f", {format_clock(elapsed / fraction - elapsed)} left"
        return text

    def brief(self) -> str:
        """Return a short text for another bar: `evaluating 45%, 0:00:37 left`."""
        percent = "" if self.fraction is None else f" {self.fraction:.0%}"
        times = self.times_text().split(", ")[-1]
        return f"{self.description}{percent}, {times}"

    def line(self) -> str:
        """Return all of it in a line: `tokenizing train  45%  0:00:30 elapsed, 0:00:37 left`."""
        percent = "" if self.fraction is None else f"{self.fraction:.0%}"
        parts = (self.description, percent, self.times_text())
        return "  ".join(part for part in parts if part)


class Display(Protocol):
    """Shows stages."""

    def show(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Show a stage while the context is open."""
        ...


_DISPLAY: contextvars.ContextVar[Display | None] = contextvars.ContextVar("display", default=None)


@contextlib.contextmanager
def stage(description: str, total: float = 0.0, expected_seconds: float = 0.0) -> Iterator[Stage]:
    """Open a stage on the display of this context, if there is one. See `Stage`."""
    opened, display = Stage(description, total, expected_seconds), _DISPLAY.get()
    with contextlib.nullcontext() if display is None else display.show(opened):
        yield opened


def track(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Yield the items as a stage, whose work is their number."""
    with stage(description, total=len(items)) as opened:
        for item in items:
            yield item
            opened.advance()


@contextlib.contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Show the stages of the block on a display."""
    token = _DISPLAY.set(display)
    try:
        yield
    finally:
        _DISPLAY.reset(token)


@contextlib.contextmanager
def show_stages(*, quiet: bool = False, console: Any = None) -> Iterator[None]:
    """Show the stages of the block on standard error: a bar on a terminal, plain lines elsewhere.

    Args:
      quiet: Show nothing.
      console: A console of rich to show them on instead.
    """
    with contextlib.nullcontext() if quiet else use_display(ConsoleDisplay(console)):
        yield


class TickingDisplay(abc.ABC):
    """Display that draws the innermost stage from a thread, since the work may block this one."""

    def __init__(self) -> None:
        self._open: list[Stage] = []
        # The thread of an outer stage may draw while an inner one ends in the main thread.
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def show(self, stage: Stage) -> Iterator[None]:
        """Show a stage while the context is open."""
        self._open.append(stage)
        ended = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(stage, ended), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ended.set()
            ticker.join()
            with self._lock:
                self._open.remove(stage)
                self.end(stage)

    def _tick(self, stage: Stage, ended: threading.Event) -> None:
        seconds = self.first_seconds
        while not ended.wait(seconds):
            with self._lock:
                is_innermost = self._open[-1] is stage
                seconds = self.draw(stage) if is_innermost else DRAW_INTERVAL_SECONDS

    first_seconds = BAR_DELAY_SECONDS
    """Seconds until a stage is drawn for the first time."""

    @abc.abstractmethod
    def draw(self, stage: Stage) -> float:
        """Show the present state of a stage; return the seconds until the next call."""

    @abc.abstractmethod
    def end(self, stage: Stage) -> None:
        """Remove what `draw` has shown of a stage."""


class LinePrinter:
    """Plain lines of stages, for log files: one after some seconds, then one at every interval."""

    def __init__(self, console: Any):
        self._console = console
        self._printed: set[int] = set()

    def draw(self, stage: Stage) -> float:
        """Print the line of a stage if it is due; return the seconds until the next one."""
        if stage.elapsed < FIRST_LINE_SECONDS:
            return FIRST_LINE_SECONDS - stage.elapsed
        self._printed.add(id(stage))
        self._print(stage.line())
        return LINE_INTERVAL_SECONDS

    def end(self, stage: Stage) -> None:
        """Print how long a stage took, if it has a line."""
        if id(stage) in self._printed:
            self._printed.remove(id(stage))
            self._print(f"{stage.description}  done in {format_clock(stage.elapsed)}")

    def _print(self, text: str) -> None:
        text = printable(text)
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class ConsoleDisplay(TickingDisplay):
    """A bar for each stage that takes longer than a second, removed at its end; or plain lines."""

    def __init__(self, console: Any = None):
        """Prepare the display.

        Args:
          console: A console of rich. None: standard error, opened when there is something to draw,
            since rich loads slowly.
        """
        super().__init__()
        self._console = console
        self._bar: Any = None
        self._drawn: Stage | None = None  # the last one on the bar
        self._lines: LinePrinter | None = None

    def draw(self, stage: Stage) -> float:
        """See `TickingDisplay`."""
        if self._bar is None and self._lines is None:
            self._open_console()
        if self._lines is not None:
            return self._lines.draw(stage)
        fraction, self._drawn = stage.fraction, stage
        self._bar.update(
            self._bar.task_ids[0],
            description=stage.description,
            total=None if fraction is None else 1.0,  # None draws a pulse
            completed=fraction or 0.0,
            percent="" if fraction is None else f"{fraction:.0%}",
            times=stage.times_text(),
        )
        return DRAW_INTERVAL_SECONDS

    def _open_console(self) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        from train.runtime.progress import can_draw_bar

        # rich asks for a whole file by type, and uses only `write`, `flush` and `isatty`.
        stream: Any = LenientStream()
        self._console = self._console or Console(file=stream)
        if not can_draw_bar(self._console):
            self._lines = LinePrinter(self._console)
            return
        self._bar = progress.Progress(
            progress.TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, max_width=max(self._console.width - 48, 10)),
            ),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[percent]}", markup=False),
            progress.TextColumn("{task.fields[times]}", markup=False),
            console=self._console,
            expand=True,
            transient=True,
            redirect_stdout=False,
            refresh_per_second=4,
        )
        self._bar.add_task("", percent="", times="")
        self._bar.start()

    def end(self, stage: Stage) -> None:
        """See `TickingDisplay`."""
        if self._lines is not None:
            self._lines.end(stage)
        # An inner stage that was too short to be drawn leaves the bar of the outer one.
        if self._bar is not None and self._drawn is stage:
            self._bar.stop()
            self._bar = None


def format_clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds, e.g. `0:01:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
