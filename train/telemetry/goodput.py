"""Goodput: the share of all the time of a run, over its lives, that made steps which count.

`time.jsonl` gets a line with every line of training metrics and at the end of a life, from one
process of several. A line has the seconds of its life so far, so that a process that is killed
takes only those since its last line with it.

time.jsonl: what the seconds of a run went into, as `train.telemetry.compute_goodput` reads it.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

from train.data.files import AnyPath
from train.run_folder.folder import RunFolder
from train.telemetry import event_log
from train.telemetry.metrics_log import FLUSH_INTERVAL_SECONDS

Activity = Literal["start", "restore", "compile", "step", "replay", "evaluate", "save", "recover"]


ACTIVITY_DESCRIPTIONS: dict[str, str] = {
    "step": "steps made for the first time",
    "replay": "steps made again, after a life that went beyond its last checkpoint",
    "start": "Python, libraries, data, tracing: all before the first step but what is named here",
    "restore": "finding, verifying and reading a checkpoint, or making the first state",
    "compile": "the first step of a life, and the program with it",
    "evaluate": "evaluations and samples",
    "save": "checkpoints, as far as training waited for them",
    "recover": "going back after a spike",
    "lost": "from the last line of a life to the beginning of the next",
}


class ActivityTimer:
    """The seconds of one life, each booked to one thing: begins with `start`."""

    def __init__(self, start_time: float | None = None, clock: Callable[[], float] = time.time):
        """Begins to count.

        Args:
          began: When the life began, seconds since the epoch; now if None.
          clock: What tells the time, likewise.
        """
        self._clock = clock
        self.began = clock() if start_time is None else start_time
        self._seconds: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self._what, self._since = _START, self.began

    def switch(self, activity: Activity) -> None:
        """From now on, time is booked to this."""
        now = self._clock()
        self._seconds[self._what] += max(0.0, now - self._since)
        self._what, self._since = activity, now

    @contextlib.contextmanager
    def track(self, activity: Activity) -> Iterator[None]:
        """Books what happens inside, and goes on with what was before."""
        before = self._what
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def to_record(self, step: int) -> event_log.JsonRecord:
        """What is known now, `step` steps being made."""
        self.switch(self._what)
        seconds = {what: round(spent, 3) for what, spent in self._seconds.items()}
        return {"began": self.began, "now": self._since, "step": step, "seconds": seconds}


MAX_SECONDS = 1e12
"""Seconds, of an epoch or a run, beyond which a line is damaged: 30,000 years."""


_START: Activity = "start"


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What the time of a run went into."""

    lives: int
    seconds: dict[str, float]
    """By the names of `MEANING`."""

    @property
    def total(self) -> float:
        """From the beginning of the first life to the last line of the last, in seconds."""
        return sum(self.seconds.values())

    @property
    def productive_fraction(self) -> float:
        """Of the time, what went into steps made for the first time."""
        return self.seconds["step"] / self.total if self.total else 0.0


def read_time_records(path: AnyPath) -> list[event_log.JsonRecord]:
    """The lines of a time.jsonl that a run has written, oldest first."""
    return [line for line in event_log.read_records(path) if _is_whole(line)]


def last_recorded_step(records: Sequence[event_log.JsonRecord]) -> int:
    """The last step that any life has told of."""
    return max((line["step"] for line in records), default=0)


def compute_goodput(records: Sequence[event_log.JsonRecord]) -> Goodput:
    """What the lines of a run's time.jsonl come to."""
    lives = {line["began"]: line for line in records}  # the last line of each
    ordered = [lives[began] for began in sorted(lives)]
    seconds: dict[str, float] = dict.fromkeys(ACTIVITY_DESCRIPTIONS, 0.0)
    for line in ordered:
        for what, spent in line["seconds"].items():
            seconds[what] += spent
    ends = [line["now"] for line in ordered]
    begins = [line["began"] for line in ordered]
    seconds["lost"] = sum(max(0.0, b - e) for b, e in zip(begins[1:], ends[:-1], strict=True))
    return Goodput(len(ordered), seconds)


def format_goodput(found: Goodput) -> str:
    """One line: `83% of 2 min 26 s made steps; start 4%, compile 5%, evaluate 8%`."""
    rest = [
        f"{what} {seconds / found.total:.0%}"
        for what, seconds in found.seconds.items()
        if what != "step" and seconds >= 0.005 * found.total > 0
    ]
    lives = f" in {found.lives} lives" if found.lives > 1 else ""
    return f"time: {found.productive_fraction:.0%} of {format_duration(found.total)}{lives} made steps; {', '.join(rest)}"


def format_duration(seconds: float) -> str:
    """`45 s`, `2 min 26 s`, `3 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def process_start_time() -> float:
    """When this process began, seconds since the epoch; now, where nobody tells."""
    now = time.time()
    try:
        # Field 22 of proc(5), counted after the name, which may have spaces: ticks since the boot.
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        return now - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return now


def _is_whole(line: Any) -> bool:
    """Whether a line is one of ours, and not what a kill or a hand has left."""
    seconds, step = line.get("seconds"), line.get("step")
    return (
        all(map(_is_time, (line.get("began"), line.get("now"))))
        and type(step) is int
        and 0 <= step < 2**31
        and isinstance(seconds, dict)
        and all(
            what in ACTIVITY_DESCRIPTIONS and _is_time(spent) for what, spent in seconds.items()
        )
    )


def _is_time(value: Any) -> bool:
    """Return True for seconds that a clock can show: a number, finite, and not negative."""
    return type(value) in (int, float) and 0 <= value <= MAX_SECONDS


class TimeLog:
    """Books steps as made for the first time or again, and writes a life's timesheet down."""

    def __init__(self, folder: RunFolder, timer: ActivityTimer, *, is_writer: bool):
        """Of several processes one writes, and has speaks."""
        self.sheet = timer
        self._path, self._speaks = folder.time_log, is_writer
        self._lines = read_time_records(folder.time_log) if is_writer else []
        self._step, self._furthest = 0, last_recorded_step(self._lines)
        self._pause = 0.0 if isinstance(folder.path, pathlib.Path) else FLUSH_INTERVAL_SECONDS
        self._written = -FLUSH_INTERVAL_SECONDS

    def start_compiling(self, step: int) -> None:
        """The state of a step is there; what comes next is the program for the others."""
        self._step = step
        self.write()
        self.sheet.switch("compile")

    def start_stepping(self, step: int) -> None:
        """Steps follow, from the one after this: some perhaps for the second time."""
        self._furthest = max(self._furthest, self._step)
        self._step = step
        self.sheet.switch("replay" if step < self._furthest else "step")

    def record_step(self, step: int) -> None:
        """A step is made."""
        self._step = step
        if step == self._furthest:
            self.sheet.switch("step")

    def write(self, *, final: bool = False) -> None:
        """A line of what is known; on an object store not every time, but the last."""
        late = time.monotonic() - self._written >= self._pause
        if self._speaks and (late or final):
            event_log.append_records(self._path, [self.sheet.to_record(self._step)])
            self._written = time.monotonic()

    def compute_goodput(self) -> Goodput:
        """Of this life and those before."""
        return compute_goodput([*self._lines, self.sheet.to_record(self._step)])
