"""Goodput: the fraction of a run's time that went into training steps made for the first time.

A run may be *started* several times: by processes, one after the other, that train in its folder.
Each appends lines to `time.jsonl`, with every line of training metrics and at its end. A line holds
the seconds since the start by activity: a killed process loses only the time since its last line.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from rich import box
from rich.table import Table

from train.files import AnyPath
from train.telemetry.event_log import JsonRecord, append_records, peak_memory_bytes, read_records

Activity = Literal["start", "restore", "compile", "step", "replay", "evaluate", "save", "recover"]

ACTIVITY_DESCRIPTIONS: dict[str, str] = {
    "step": "steps made for the first time",
    "replay": "steps made again, after a process that went beyond its last checkpoint",
    "start": "Python, libraries, data, tracing: all else before the first step",
    "restore": "finding, verifying and reading a checkpoint, or making the first state",
    "compile": "the first step after a start, and the program with it",
    "evaluate": "evaluations and samples",
    "save": "checkpoints, as far as training waited for them",
    "recover": "rolling back after an anomaly",
    "lost": "from the last line of a process that was stopped to the start of the next",
}
"""Description of each activity, and of the time between two processes."""

REMOTE_INTERVAL_SECONDS = 30.0
"""Time between lines of a remote file, which is written whole each time."""


class ActivityTimer:
    """Count the seconds of one process by activity. It begins with `start`."""

    def __init__(self, start_time: float | None = None, clock: Callable[[], float] = time.time):
        """Start counting.

        Args:
          start_time: Start of the process, in seconds since the epoch; None: now.
          clock: Returns the current time in seconds since the epoch.
        """
        self._clock = clock
        self.start_time = clock() if start_time is None else start_time
        self._seconds: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self._activity: Activity = "start"
        self._since = self.start_time

    def switch(self, activity: Activity) -> None:
        """Count the time from now on under another activity."""
        now = self._clock()
        # The clock may be set back; no activity takes negative time.
        self._seconds[self._activity] += max(0.0, now - self._since)
        self._activity, self._since = activity, now

    @contextlib.contextmanager
    def track(self, activity: Activity) -> Iterator[None]:
        """Count the time of the block under an activity, then return to the one before."""
        before = self._activity
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def to_record(self, step: int) -> JsonRecord:
        """Return the line of `time.jsonl` for now, after `step` steps."""
        self.switch(self._activity)
        seconds = {activity: round(spent, 3) for activity, spent in self._seconds.items()}
        return {"began": self.start_time, "now": self._since, "step": step, "seconds": seconds}


class TimeLog:
    """Write the timer's record of this process to `time.jsonl`; replayed steps count separately."""

    def __init__(self, path: AnyPath, timer: ActivityTimer, *, is_writer: bool):
        """Read the records of earlier processes.

        Args:
          path: The file.
          timer: Timer of this process.
          is_writer: This process writes the file. One of several processes does.
        """
        self.timer = timer
        self._path, self._is_writer = path, is_writer
        self._records = read_time_records(path) if is_writer else []
        self._step = 0
        self._furthest_step = max((record["step"] for record in self._records), default=0)
        self._interval = 0.0 if isinstance(path, pathlib.Path) else REMOTE_INTERVAL_SECONDS
        self._written_at = -REMOTE_INTERVAL_SECONDS

    def previous_seconds(self, activity: Activity) -> float:
        """Return how long an activity took in the process before this one. 0: there was none."""
        return float(self._records[-1]["seconds"].get(activity, 0.0)) if self._records else 0.0

    def start_compiling(self, step: int) -> None:
        """Count the time from now on as compilation. The state of `step` is restored."""
        self._step = step
        self.write()
        self.timer.switch("compile")

    def start_stepping(self, step: int) -> None:
        """Count the time from now on as steps after `step`: replayed ones first, if any."""
        self._furthest_step = max(self._furthest_step, self._step)
        self._step = step
        self.timer.switch("replay" if step < self._furthest_step else "step")

    def record_step(self, step: int) -> None:
        """Record that `step` steps are made."""
        self._step = step
        if step == self._furthest_step:
            self.timer.switch("step")

    def write(self, *, final: bool = False, finished: bool = False) -> None:
        """Append a line. A remote file gets one only from time to time, and a final one.

        A finished process was not stopped: a later start, which extends the run, lost no time.
        """
        late = time.monotonic() - self._written_at >= self._interval
        if self._is_writer and (late or final):
            record = self.timer.to_record(self._step) | {"peak_memory_bytes": peak_memory_bytes()}
            record |= {"finished": True} if finished else {}
            append_records(self._path, [record])
            self._written_at = time.monotonic()

    def compute_goodput(self) -> "Goodput":
        """Return the goodput of the run so far, this process included."""
        return compute_goodput([*self._records, self.timer.to_record(self._step)])


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Time of a run by activity."""

    starts: int
    """Number of times that the run was started or resumed."""
    seconds: dict[str, float]
    """Seconds by the names of `ACTIVITY_DESCRIPTIONS`."""

    @property
    def total(self) -> float:
        """Seconds of all processes, and those lost between them."""
        return sum(self.seconds.values())

    @property
    def of_processes(self) -> float:
        """Seconds of all processes, without those between them, in which a run may have waited."""
        return self.total - self.seconds["lost"]

    @property
    def productive_fraction(self) -> float:
        """Fraction of the time that went into steps made for the first time."""
        return self.seconds["step"] / self.total if self.total else 0.0


def read_time_records(path: AnyPath) -> list[JsonRecord]:
    """Return the lines of a time.jsonl, oldest first."""
    needed = {"began", "now", "step", "seconds"}
    return [record for record in read_records(path) if needed <= record.keys()]


def previous_resume_seconds(path: AnyPath) -> float:
    """Return how long the last resume of a run took to restore its state. 0: there was none."""
    records = read_time_records(path)
    if len({record["began"] for record in records}) < 2:  # the first process restored nothing
        return 0.0
    return float(records[-1]["seconds"].get("restore", 0.0))


def compute_goodput(records: Sequence[JsonRecord]) -> Goodput:
    """Sum the records of a run over its starts."""
    # A later line replaces one. In the order of the file, as the clock may have been set back.
    processes = list({record["began"]: record for record in records}.values())
    seconds: dict[str, float] = dict.fromkeys(ACTIVITY_DESCRIPTIONS, 0.0)
    for process in processes:
        for activity, spent in process["seconds"].items():
            seconds[activity] += spent
    seconds["lost"] = sum(
        max(0.0, following["began"] - process["now"])
        for process, following in itertools.pairwise(processes)
        if not process.get("finished")
    )
    return Goodput(len(processes), seconds)


def format_goodput(goodput: Goodput) -> str:
    """Return e.g. `time: 83% of 2 min 26 s went into training steps; start 4%, compile 5%`."""
    total = goodput.total
    first = {"restore": "initialize"} if goodput.starts == 1 else {}  # nothing was restored
    rest = [
        f"{first.get(activity, activity)} {seconds / total:.0%}"
        for activity, seconds in goodput.seconds.items()
        if activity != "step" and seconds >= 0.005 * total > 0
    ]
    starts = f" in {goodput.starts} starts" if goodput.starts > 1 else ""
    productive = f"{goodput.productive_fraction:.0%} of {format_duration(total)}"
    return f"time: {productive}{starts} went into training steps; {', '.join(rest)}"


def goodput_table(goodput: Goodput) -> Table:
    """Return a table of the activities that took time."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    starts = f"in {goodput.starts} start{'s' if goodput.starts > 1 else ''}"
    table.add_column("activity", "all")
    table.add_column("share", "100.0%", justify="right")
    table.add_column("time", format_duration(goodput.total), justify="right")
    table.add_column("what it is", starts)
    for activity, seconds in goodput.seconds.items():
        if seconds or activity == "step":
            share, duration = f"{seconds / (goodput.total or 1):.1%}", format_duration(seconds)
            table.add_row(activity, share, duration, ACTIVITY_DESCRIPTIONS[activity])
    return table


def format_duration(seconds: float) -> str:
    """Return e.g. `4.5 s`, `45 s`, `2 min 26 s`, `3 h 5 min` or `10 days 4 h`."""
    rounded = round(seconds)
    if rounded < 10:
        return f"{seconds:.1f} s"
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 48 * 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86_400:,} days {rounded % 86_400 // 3600} h"


def process_start_time() -> float:
    """Return the start of this process in seconds since the epoch; now, where it is unknown."""
    now = time.time()
    try:
        # Field 22 of proc(5) is the start in clock ticks since the boot. Fields are counted after
        # the process name, which may contain spaces.
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux
        return now
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
