"""Write metrics.jsonl, one line for each logged step and split, and mirror it to TensorBoard.

TensorBoard's files are in a folder for each split, so that splits share a chart.
"""

import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeGuard

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from train.files import AnyPath
from train.runtime.writing import explain_write_errors, unused_path, write_atomically
from train.telemetry import event_log

FLUSH_INTERVAL_SECONDS = 30.0

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class MetricsLog:
    """Writer of a run's metrics. One process has one, and calls `set_aside_after` first.

    A line is `{"step": 120, "split": "train", "loss": 3.25, ...}`. On a local disk it is in the
    file when `write` returns, so a process that is killed loses none. Remote files and
    TensorBoard's files are written every `FLUSH_INTERVAL_SECONDS` and by `close`.
    """

    def __init__(
        self, path: AnyPath, tensorboard: AnyPath, *, clock: Callable[[], float] = time.monotonic
    ):
        self._path, self._tensorboard, self._clock = path, tensorboard, clock
        self._flushed = clock()
        self._buffer: list[Mapping[str, Any]] = []
        self._mirrors: dict[str, TensorBoardWriter] = {}
        self._resumed_at: int | None = None

    def set_aside_after(self, step: int | None) -> "AnyPath | None":
        """Move the lines after `step`, and torn lines, to a file of their own.

        A resumed run writes these lines again.

        Args:
          step: Step that training continues from; None: move all lines.

        Returns:
          The new file, beside metrics.jsonl; None if no line was moved.
        """
        last = self._resumed_at = -1 if step is None else step
        kept_lines: list[str] = []
        beyond: list[str] = []
        for line in event_log.read_raw_lines(self._path):
            line_step = (event_log.parse_line(line) or {}).get("step")
            is_kept = is_step_number(line_step) and line_step <= last
            (kept_lines if is_kept else beyond).append(f"{line}\n")
        if not beyond:
            return None
        aside = unused_path(self._path, f"beyond-{max(last, 0)}")
        # In this order, a kill between the two writes duplicates lines and never loses one.
        write_atomically(aside, "".join(beyond))
        write_atomically(self._path, "".join(kept_lines))
        return aside

    def write(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Append a line.

        Throughput leaves out evaluations and saves. The first step after a start, a resume or a
        rollback has none, as it also compiles or waits for data.

        Args:
          step: Number of updates so far.
          split: "train", "validation" or "test".
          metrics: Values by name: `loss` (nats a token), `grad_norm`, `learning_rate`,
            `tokens_per_second` since the line before. Non-finite values become strings
            (`train.telemetry.event_log.format_line`).

        Raises:
          UserError: The file cannot be written; earlier lines are intact.
        """
        self._buffer.append({"step": step, "split": split, **metrics})
        late = self._clock() - self._flushed >= FLUSH_INTERVAL_SECONDS
        if late or isinstance(self._path, pathlib.Path):
            self._append()
        if split not in self._mirrors:
            hidden_from = None if self._resumed_at is None else self._resumed_at + 1
            self._mirrors[split] = TensorBoardWriter(self._tensorboard / split, hidden_from)
        self._mirrors[split].write(step, metrics)
        if late:
            for mirror in self._mirrors.values():
                mirror.flush()
            self._flushed = self._clock()

    def close(self) -> None:
        """Write buffered lines, and close TensorBoard's files."""
        self._append()
        while self._mirrors:
            self._mirrors.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self) -> None:
        if self._buffer:
            event_log.append_records(self._path, self._buffer)
            self._buffer = []


def read_metrics(path: AnyPath) -> list[event_log.JsonRecord]:
    """Return the lines of a metrics.jsonl, with non-finite values as floats again."""
    return [
        {name: float(value) if value in _NOT_FINITE else value for name, value in line.items()}
        for line in event_log.read_records(path)
        if is_step_number(line.get("step")) and isinstance(line.get("split"), str)
    ]


def is_step_number(value: Any) -> TypeGuard[int]:
    """Return True for a valid step number: a non-negative int32."""
    return type(value) is int and 0 <= value < 2**31


class TensorBoardWriter:
    """Writer of one event file, on the calling thread.

    Only the record format and the messages of tensorboardX are used. Its `SummaryWriter` writes on
    a thread that dies silently when the disk is full, and then blocks the run forever. A remote
    file is written to a local temporary folder, and copied at each flush.
    """

    def __init__(self, folder: AnyPath, hidden_from: int | None):
        """Create a file in `folder`.

        Args:
          folder: Folder of one split, local or remote.
          hidden_from: TensorBoard hides events of this step and later in older files of the folder;
            None hides nothing.

        Raises:
          UserError: The file cannot be created.
        """
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        local = self._path
        with explain_write_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            if not isinstance(local, pathlib.Path):
                self._spool = tempfile.TemporaryDirectory()
                local = pathlib.Path(self._spool.name, name)
            self._local = local
            self._records = RecordWriter(str(local))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if hidden_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=hidden_from, session_log=start))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values of one step, by name; those that are no numbers are left out."""
        scalars = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if isinstance(value, int | float) or hasattr(value, "item")
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Make everything written so far visible to TensorBoard."""
        with explain_write_errors(self._path):
            self._records.flush()
            if self._spool:
                self._path.write_bytes(self._local.read_bytes())

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            with explain_write_errors(self._path):
                self._records.close()
            if self._spool:
                self._spool.cleanup()

    def _write(self, event: Any) -> None:
        with explain_write_errors(self._path):
            self._records.write(event.SerializeToString())
