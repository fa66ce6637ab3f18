"""Show progress on standard error: a bar in terminals and notebooks, plain lines elsewhere."""

import contextlib
import importlib.util
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich import progress
from rich.console import Console

from train.errors import printable
from train.runtime.startup import LenientStream
from train.telemetry.stages import (
    DRAW_INTERVAL_SECONDS,
    LinePrinter,
    Stage,
    TickingDisplay,
    format_clock,
    use_display,
)

LINE_INTERVAL_SECONDS = 30.0
"""Seconds between plain lines, where no bar can be drawn."""


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
        self._description = description
        # rich asks for a whole file by type, and uses only `write`, `flush` and `isatty`.
        stream: Any = LenientStream()
        self._console = console or Console(file=stream, quiet=quiet)
        self._clock = clock
        self._started_at = self._timed_from = self._next_line_at = clock()
        self._loss = self._speed = ""
        self._bar = _make_bar(self._console, clock) if can_draw_bar(self._console) else None
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
        self._step = step
        if loss is not None:
            self._loss = f"loss {loss:.4f}"
        if tokens_per_second is not None:
            self._speed = f"{tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=self._loss, speed=self._speed)
        elif self._clock() >= self._next_line_at or step == self._total:
            self._next_line_at = self._clock() + LINE_INTERVAL_SECONDS
            self.print(self._line())

    def mark_compiled(self, step: int) -> None:
        """Estimate the time left from the steps after `step`: the first one has compiled."""
        self._timed_from_step, self._timed_from = step, self._clock()

    @property
    def console(self) -> Console:
        """Console of the bar."""
        return self._console

    def show_in_bar(self, text: str) -> bool:
        """Show a text in place of loss and speed; empty: show these. False: there is no bar."""
        if self._bar is None:
            return False
        loss, speed = (text, "") if text else (self._loss, self._speed)
        self._bar.update(self._task, loss=loss, speed=speed)
        return True

    def print(self, text: str) -> None:
        """Print text as it is, above the bar."""
        self._console.print(
            printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def __enter__(self) -> Self:
        self._started_at = self._timed_from = self._next_line_at = self._clock()
        if self._bar is not None:
            self._task = self._bar.add_task(
                self._description, total=self._total, completed=self._step, loss="", speed=""
            )
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
        now = self._clock()
        steps_left, steps_timed = self._total - self._step, self._step - self._timed_from_step
        if steps_timed > 0 or steps_left <= 0:
            seconds_left = (now - self._timed_from) / max(steps_timed, 1) * max(steps_left, 0)
            left = format_clock(seconds_left)
        else:
            left = "?"
        count = f"{self._step}/{self._total}"
        times = f"{format_clock(now - self._started_at)} elapsed, {left} left"
        parts = (self._description, count, self._loss, self._speed, times)
        return "  ".join(part for part in parts if part)


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


def _make_bar(console: Console, clock: Callable[[], float]) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[loss]}"),
        progress.TextColumn("{task.fields[speed]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("elapsed"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
        console=console,
        expand=True,
        get_time=clock,
        redirect_stdout=False,  # what is piped to another program must arrive there
        refresh_per_second=4,  # each takes time from the step on a small machine
        speed_estimate_period=120,
    )
