"""time.jsonl: what the seconds of a run went into, as `train.goodput` reads it."""

import pathlib
import time

from train import jsonl
from train.goodput import Goodput, Timesheet, furthest, goodput, read_lines
from train.metrics import FLUSH_SECONDS
from train.runfolder import RunFolder


class TimeLog:
    """Books steps as made for the first time or again, and writes a life's timesheet down."""

    def __init__(self, folder: RunFolder, sheet: Timesheet, *, speaks: bool):
        """Of several processes one writes, and has speaks."""
        self.sheet = sheet
        self._path, self._speaks = folder.times, speaks
        self._lines = read_lines(folder.times) if speaks else []
        self._step, self._furthest = 0, furthest(self._lines)
        self._pause = 0.0 if isinstance(folder.path, pathlib.Path) else FLUSH_SECONDS
        self._written = -FLUSH_SECONDS

    def begin(self, step: int) -> None:
        """The state of a step is there; what comes next is the program for the others."""
        self._step = step
        self.write()
        self.sheet.switch("compile")

    def step_from(self, step: int) -> None:
        """Steps follow, from the one after this: some perhaps for the second time."""
        self._furthest = max(self._furthest, self._step)
        self._step = step
        self.sheet.switch("replay" if step < self._furthest else "step")

    def step(self, step: int) -> None:
        """A step is made."""
        self._step = step
        if step == self._furthest:
            self.sheet.switch("step")

    def write(self, *, last: bool = False) -> None:
        """A line of what is known; on an object store not every time, but the last."""
        late = time.monotonic() - self._written >= self._pause
        if self._speaks and (late or last):
            jsonl.append(self._path, [self.sheet.line(self._step)])
            self._written = time.monotonic()

    def goodput(self) -> Goodput:
        """Of this life and those before."""
        return goodput([*self._lines, self.sheet.line(self._step)])
