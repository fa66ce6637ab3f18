"""Progress of long work: bars on a terminal or in a notebook, plain lines elsewhere.

Code that does such work opens a `stage` and advances it. It does not know where progress is shown:
the display that a caller opened around it (`fit`, a verb) shows the stage, and without a display
nothing happens. So functions of data and evaluation stay silent in a program of the user's own.
"""

import contextlib
import contextvars
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from train.errors import printable
from train.runtime.startup import LenientStream

BAR_DELAY_SECONDS = 1.0
"""Time after which the bar of a stage appears. Shorter ones would only flicker."""

FIRST_LINE_SECONDS = 10.0
"""Time after which a stage gets its first plain line, where no bar can be drawn."""

LINE_INTERVAL_SECONDS = 30.0
"""Time between plain lines."""

SPEED_SECONDS = 3600.0
"""Time over which rich averages the speed: evaluations and saves are a part of the time left."""

Item = TypeVar("Item")
"""Type variable: an element of a sequence."""


class Stage:
    """Work in progress."""

    def __init__(
        self, bars: progress.Progress, description: str, total: float = 0.0, status: str = ""
    ):
        self.bars = bars
        self.task = bars.add_task(description, total=total or None, visible=False, status=status)
        self._began = bars.get_time()

    def advance(self, amount: float = 1.0) -> None:
        """Count an amount of work as done."""
        self.bars.advance(self.task, amount)

    def rename(self, description: str) -> None:
        """Continue with other work of unknown amount."""
        visible = self.bars.tasks[-1].visible
        self.bars.remove_task(self.task)
        self.task = self.bars.add_task(description, total=None, visible=visible, status="")

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.bars.get_time() - self._began


class Display:
    """Shows stages: a bar for each that takes longer than a second, or plain lines."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the display, on standard error by default: standard output is for results."""
        # rich asks for a whole file by type, and uses only `write`, `flush` and `isatty`.
        stream: Any = LenientStream()
        self.console = console or Console(file=stream, quiet=quiet)
        self.clock = clock
        self.draws_bars = can_draw_bars(self.console)
        self.bars = self.make_bars(transient=True)

    def make_bars(self, *, transient: bool) -> progress.Progress:
        """Return rich's display of tasks. A transient one vanishes when it stops."""
        return progress.Progress(
            _TextColumn(lambda task: task.description, Column()),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what is left
            _TextColumn(status_text, Column()),
            _TextColumn(times_text, Column(no_wrap=True)),  # the last to give way
            console=self.console,
            disable=not self.draws_bars,
            transient=transient,
            expand=True,
            get_time=self.clock,
            speed_estimate_period=SPEED_SECONDS,
            redirect_stdout=False,  # what is piped to another program must arrive there
            refresh_per_second=4,  # each takes time from the step on a small machine
        )

    def print(self, text: str) -> None:
        """Print text as it is, above the bars."""
        text = printable(text)
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @contextlib.contextmanager
    def show(self, description: str, total: float, status: str = "") -> Iterator[Stage]:
        """Show a stage while the context is open."""
        stage, ended = Stage(self.bars, description, total, status), threading.Event()
        thread = threading.Thread(target=self._show_later, args=(stage, ended), daemon=True)
        if not self.console.quiet:
            thread.start()
        try:
            yield stage
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            if len(self.bars.tasks) == 1:
                if self.draws_bars:  # else rich 13 prints an empty line
                    self.bars.stop()  # with the task, whose line it erases
                self.bars = self.make_bars(transient=True)
            else:
                self.bars.remove_task(stage.task)

    def _show_later(self, stage: Stage, ended: threading.Event) -> None:
        """Show the bar of a stage after a while, or print its lines, as its work may block."""
        if self.draws_bars:
            if not ended.wait(BAR_DELAY_SECONDS):
                stage.bars.update(stage.task, visible=True)
                stage.bars.start()
            return
        seconds = FIRST_LINE_SECONDS
        while not ended.wait(seconds):
            seconds = LINE_INTERVAL_SECONDS
            innermost = stage.bars.tasks[-1]
            if innermost.id == stage.task:
                self.print(line_of(innermost))
        if seconds == LINE_INTERVAL_SECONDS:
            self.print(f"{stage.bars.tasks[-1].description}  done in {format_clock(stage.elapsed)}")


DISPLAY: contextvars.ContextVar[Display | None] = contextvars.ContextVar("display", default=None)
"""Display that shows the stages of this context."""


@contextlib.contextmanager
def stage(description: str, total: float = 0.0, expected_seconds: float = 0.0) -> Iterator[Stage]:
    """Open a stage on the display of this context, if there is one.

    Args:
      description: What is done, as in "tokenizing train".
      total: Amount of work, in any unit. 0: unknown.
      expected_seconds: Duration of the same work before, if it is known.
    """
    status = f"took {format_clock(expected_seconds)} before" if expected_seconds >= 1 else ""
    if (display := DISPLAY.get()) is None:
        yield Stage(progress.Progress(disable=True), description, total)
        return
    with display.show(description, total, status) as opened:
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
    token = DISPLAY.set(display)
    try:
        yield
    finally:
        DISPLAY.reset(token)


@contextlib.contextmanager
def show_stages(*, quiet: bool = False, console: Console | None = None) -> Iterator[None]:
    """Show the stages of the block, by default on standard error. If quiet, show nothing."""
    with contextlib.nullcontext() if quiet else use_display(Display(console)):
        yield


def can_draw_bars(console: Console) -> bool:
    """Return True if the console can show bars."""
    if console.quiet:
        return False
    if console.is_jupyter:
        # rich draws with ipywidgets there, and warns at every step if they are missing.
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


class _TextColumn(progress.ProgressColumn):
    """Text of a task; it is cut where the terminal is narrow."""

    def __init__(self, text: Callable[[progress.Task], str], column: Column):
        super().__init__(column)
        self._text = text

    def render(self, task: progress.Task) -> Text:
        return Text(self._text(task), no_wrap=True, overflow="ellipsis")


def line_of(task: progress.Task) -> str:
    """Return a task in a line: `tokenizing train  45%  0:00:30 elapsed, 0:00:37 left`."""
    parts = (task.description, status_text(task), times_text(task))
    return "  ".join(part for part in parts if part)


def status_text(task: progress.Task) -> str:
    """Return the status of a task, or else how much is done, if that is known."""
    status: str = task.fields["status"]
    return status or ("" if task.total is None else f"{task.percentage:.0f}%")


def times_text(task: progress.Task) -> str:
    """Return the elapsed time and, where the amount of work is known, the time left."""
    elapsed = f"{format_clock(task.elapsed or 0.0)} elapsed"
    if task.total is None:
        return elapsed
    left = task.time_remaining
    return f"{elapsed}, {'?' if left is None else format_clock(left)} left"


def format_clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds, e.g. `0:01:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
