"""Scalars for TensorBoard, in a folder for each split so that splits share a chart."""

from __future__ import annotations

import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from train.data.files import AnyPath
from train.run_folder.folder import explain_write_errors
from train.run_folder.regular_files import check_not_symlink


class TensorBoardWriter:
    """One event file, written by the thread that calls.

    tensorboardX's own `SummaryWriter` writes in a thread that dies silently when the disk is full,
    and then blocks the run for ever; so only its records and messages are used. A remote file is
    written here and copied there at each flush.
    """

    def __init__(self, folder: AnyPath, purge_step: int | None):
        """Begins a file in ``folder``. TensorBoard hides older events of ``purge_step`` on."""
        from tensorboardX.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        local = self._path
        with explain_write_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            check_not_symlink(folder)
            if not isinstance(local, pathlib.Path):
                self._spool = tempfile.TemporaryDirectory()
                local = pathlib.Path(self._spool.name, name)
            self._local = local
            self._records = RecordWriter(str(local))
        self._begin(purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of one step, by name."""
        from tensorboardX.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(
            value=[
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
            ]
        )
        self._write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Lets TensorBoard see what was written."""
        with explain_write_errors(self._path):
            self._records.flush()
            if self._spool:
                self._path.write_bytes(self._local.read_bytes())

    def close(self) -> None:
        """Flushes, and writes no more."""
        try:
            self.flush()
        finally:
            with explain_write_errors(self._path):
                self._records.close()
            if self._spool:
                self._spool.cleanup()

    def _begin(self, hidden_from: int | None) -> None:
        from tensorboardX.proto import event_pb2

        now = time.time()
        self._write(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if hidden_from is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=now, step=hidden_from, session_log=start))

    def _write(self, event: Any) -> None:
        with explain_write_errors(self._path):
            self._records.write(event.SerializeToString())
