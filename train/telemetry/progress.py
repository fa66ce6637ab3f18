"""How far a run is, on standard error: a bar in a terminal or notebook, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich import progress
from rich.console import Console

from train.runtime.standard_error import LenientStream

LINE_INTERVAL_SECONDS = 30.0


# A model can write any character. Those that would command the terminal are shown as pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class ProgressBar:
    """Step, loss, tokens a second, time gone and time left.

    Without a terminal (a log file, a job's output) there is a plain line every `LINE_SECONDS`, at
    the first step and at the last. Standard output is left to what was asked for.
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
        """Shows nothing yet; ``with`` begins.

        Args:
          total: Steps at the end.
          done: Steps made before, by the run that is resumed.
          description: What is under way, in a word.
          quiet: Show nothing at all, and no `print` either.
          console: Where to show it; standard error if None.
          clock: Seconds, from any moment on.
        """
        self._total = total
        self._done = self._first = initial_step
        self._description = description
        # rich's type is that of a whole file, of which it only writes, flushes and asks isatty.
        stream: Any = LenientStream()
        self._console = console or Console(file=stream, quiet=quiet)
        self._clock = clock
        self._began = self._due = clock()
        self._loss = self._speed = ""
        self._bar = _bar(self._console, clock) if _can_draw(self._console) else None
        self._task = progress.TaskID(0)

    def update(
        self, step: int, *, loss: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Shows that ``step`` steps are made, and what is known of the last of them.

        Args:
          step: Steps made so far.
          loss: The last loss, nats a token; what was shown stays if None.
          tokens_per_second: Likewise.
        """
        self._done = step
        if loss is not None:
            self._loss = f"loss {loss:.4f}"
        if tokens_per_second is not None:
            self._speed = f"{tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=self._loss, speed=self._speed)
        elif self._clock() >= self._due or step == self._total:
            self._due = self._clock() + LINE_INTERVAL_SECONDS
            self.print(self._line())

    def print(self, text: str) -> None:
        """Shows text as it is, above the bar: a result, a sample."""
        safe = text.translate(_PICTURES)
        self._console.print(safe, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._began = self._due = self._clock()
        if self._bar is not None:
            self._task = self._bar.add_task(
                self._description, total=self._total, completed=self._done, loss="", speed=""
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()  # which stop alone does not, in a notebook
            self._bar.stop()

    def _line(self) -> str:
        gone = self._clock() - self._began
        made = self._done - self._first
        left = format_clock(gone / made * (self._total - self._done)) if made > 0 else "?"
        count = f"{self._done}/{self._total}"
        times = f"{format_clock(gone)} gone, {left} left"
        parts = (self._description, count, self._loss, self._speed, times)
        return "  ".join(part for part in parts if part)


def format_clock(seconds: float) -> str:
    """Seconds as people read them: ``0:01:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def _can_draw(console: Console) -> bool:
    """In a notebook rich draws with ipywidgets, and warns at every step if they are not there."""
    if console.quiet:
        return False
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def _bar(console: Console, clock: Callable[[], float]) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[loss]}"),
        progress.TextColumn("{task.fields[speed]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("gone"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
        console=console,
        expand=True,
        get_time=clock,
        redirect_stdout=False,  # what is piped to another program must arrive there
        refresh_per_second=4,  # each takes time from the step on a small machine
        speed_estimate_period=120,
    )
