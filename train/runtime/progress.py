"""Show progress on standard error: a bar in terminals and notebooks, plain lines elsewhere."""

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from train.errors import printable
from train.runtime.stages import (
    DRAW_INTERVAL_SECONDS,
    LinePrinter,
    Stage,
    TickingDisplay,
    format_clock,
    use_display,
)
from train.runtime.startup import LenientStream

LINE_INTERVAL_SECONDS = 30.0
"""Seconds between plain lines, where no bar can be drawn."""

MIN_BAR_WIDTH = 10
"""Columns that the bar keeps, with the spaces around it."""


class ProgressBar:
    """Progress bar with step, loss, tokens per second, elapsed time and time left.

    Without a terminal (a log file, the output of a job) it prints a plain line every
    `LINE_INTERVAL_SECONDS`, at the first step and at the last. Standard output stays free for
    results.
    """

    def __init__(
        self,
        total: int,
        *,
        initial_step: int = 0,
        description: str = "train",
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the bar; entering the context shows it.

        Args:
          total: Number of steps at the end.
          initial_step: Steps made before, by the run that is resumed.
          description: Name of what is in progress.
          quiet: Show nothing, `print` included.
          console: Output; None: standard error.
          clock: Returns seconds from any origin.
        """
        self._total = total
        self._step = self._timed_from_step = initial_step
        self._stage = ""
        self._description = description
        # rich asks for a whole file by type, and uses only `write`, `flush` and `isatty`.
        stream: Any = LenientStream()
        self._console = console or Console(file=stream, quiet=quiet)
        self._clock = clock
        self._started_at = self._timed_from = self._updated_at = self._next_line_at = clock()
        self._loss = self._speed = ""
        self._bar = self._make_bar() if can_draw_bar(self._console) else None
        self._task = progress.TaskID(0)
        self._exits = contextlib.ExitStack()

    def update(
        self, step: int, *, loss: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Show the number of steps made.

        Args:
          step: Steps made so far.
          loss: Last loss in nats a token; None leaves the one shown.
          tokens_per_second: Throughput; None leaves the one shown.
        """
        # Steps before a rollback were made too.
        self._timed_from_step += min(step - self._step, 0)
        self._step, self._updated_at = step, self._clock()
        if loss is not None:
            self._loss = f"loss {loss:.4f}"
        if tokens_per_second is not None:
            self._speed = f"{tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        elif self._clock() >= self._next_line_at or step == self._total:
            self._next_line_at = self._clock() + LINE_INTERVAL_SECONDS
            self.print(self._line())

    @contextlib.contextmanager
    def leave_out_step(self, step: int) -> Iterator[None]:
        """Estimate the time left without the step that is made in the block: it compiles.

        Before the first step, the time until its block is left out too: data are prepared then.
        """
        began = self._timed_from if step == self._timed_from_step + 1 else self._clock()
        yield
        self._timed_from_step += 1
        self._timed_from += self._clock() - began

    @property
    def console(self) -> Console:
        """Console of the bar."""
        return self._console

    def show_in_bar(self, text: str) -> bool:
        """Show a text in place of loss and speed; empty: show these. False: there is no bar."""
        self._stage = text
        return self._bar is not None

    def print(self, text: str) -> None:
        """Print text as it is, above the bar."""
        self._console.print(
            printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def __enter__(self) -> Self:
        self._started_at = self._timed_from = self._next_line_at = self._clock()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total, completed=self._step)
            self._bar.start()
        self._exits.enter_context(use_display(_DisplayOfBar(self)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()
        if self._bar is not None:
            self._bar.refresh()  # in a notebook, `stop` alone does not show the last step
            self._bar.stop()

    def _line(self) -> str:
        times = f"{self._elapsed()}, {self._left()}"
        parts = (self._description, self._count(), self._loss, self._speed, times)
        return "  ".join(part for part in parts if part)

    def status(self) -> str:
        """Return what stands right of the bar, as much as fits. The time left always stays."""
        details = (self._stage,) if self._stage else (self._loss, self._speed)
        count, elapsed, left = self._count(), self._elapsed(), self._left()
        choices = [(count, *details, elapsed, left), (count, *details, left)]
        choices += [(count, details[0], left), (count, left), (left,)]
        texts = ["  ".join(part for part in parts if part) for parts in choices]
        room = self._console.width - len(self._description) - MIN_BAR_WIDTH
        return next((text for text in texts if len(text) <= room), left)

    def _count(self) -> str:
        return f"{self._step}/{self._total}"

    def _elapsed(self) -> str:
        return f"{format_clock(self._clock() - self._started_at)} elapsed"

    def _left(self) -> str:
        steps_left, steps_timed = self._total - self._step, self._step - self._timed_from_step
        if steps_timed <= 0 < steps_left:
            return "? left"
        seconds_a_step = (self._updated_at - self._timed_from) / max(steps_timed, 1)
        return f"{format_clock(seconds_a_step * max(steps_left, 0))} left"

    def _make_bar(self) -> progress.Progress:
        return progress.Progress(
            progress.TextColumn(self._description, markup=False),
            progress.BarColumn(bar_width=None),
            _StatusColumn(self),
            console=self._console,
            expand=True,
            get_time=self._clock,
            redirect_stdout=False,  # what is piped to another program must arrive there
            refresh_per_second=4,  # each takes time from the step on a small machine
        )


class _StatusColumn(progress.ProgressColumn):
    """Text of a `ProgressBar` right of its bar."""

    def __init__(self, bar: ProgressBar):
        super().__init__(Column(no_wrap=True))
        self._bar = bar

    def render(self, task: progress.Task) -> Text:
        return Text(self._bar.status())


class _DisplayOfBar(TickingDisplay):
    """Shows stages between steps, such as evaluations, in place of the bar's loss and speed."""

    def __init__(self, bar: ProgressBar):
        super().__init__()
        self._bar, self._lines = bar, LinePrinter(bar.console)

    def draw(self, stage: Stage) -> float:
        if not self._bar.show_in_bar(stage.brief()):
            return self._lines.draw(stage)
        return DRAW_INTERVAL_SECONDS

    def end(self, stage: Stage) -> None:
        if not self._bar.show_in_bar(""):
            self._lines.end(stage)


def can_draw_bar(console: Console) -> bool:
    """Return True if the console can show a bar."""
    if console.quiet:
        return False
    if console.is_jupyter:
        # rich draws with ipywidgets there, and warns at every step if they are missing.
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal
