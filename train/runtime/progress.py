"""Progress of steps on standard error: a bar in terminals and notebooks, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console

from train.runtime.stages import LINE_INTERVAL_SECONDS, Display, line_of, use_display


class ProgressBar(Display):
    """Bar with a status, elapsed time and time left; stages within it appear below.

    Where no bar can be drawn (a log file, the output of a job) it prints a plain line every
    `LINE_INTERVAL_SECONDS`, at the first update and at the last.
    """

    def __init__(
        self,
        total: float,
        *,
        completed: float = 0.0,
        description: str = "",
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the bar; entering the context shows it.

        `completed` was done before, by the run that is resumed. Quiet, not even `print` shows.
        """
        super().__init__(console, quiet=quiet, clock=clock)
        self._total, self._completed, self._description = total, completed, description
        self._next_line_at = clock()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.bars = self.make_bars(transient=False)
        self._task = self.bars.add_task(
            self._description, total=self._total, completed=int(self._completed), status=""
        )
        if self.draws_bars:  # else rich 13 prints an empty line at the end
            self._exits.enter_context(self.bars)
        self._exits.enter_context(use_display(self))
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.refresh()  # in a notebook, `stop` alone does not show the last step
        self._exits.close()

    def update(self, completed: float, status: str = "") -> None:
        """Show how much is done, and a status; an empty one leaves the one shown.

        The time left counts from the first update: what came before prepared the work.
        """
        shown = status or self.bars.tasks[0].fields["status"]
        self.bars.update(self._task, completed=completed, status=shown)
        due = self.clock() >= self._next_line_at or completed >= self._total
        if not self.draws_bars and due and status:
            self._next_line_at = self.clock() + LINE_INTERVAL_SECONDS
            self.print(line_of(self.bars.tasks[0]))
