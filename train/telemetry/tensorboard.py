"""Write scalars for TensorBoard, a folder for each split so that splits share a chart."""

import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from train.data.files import AnyPath
from train.run_folder.writing import check_not_symlink, explain_write_errors


class TensorBoardWriter:
    """Writer of one event file, on the calling thread.

    Only the record format and the messages of tensorboardX are used. Its `SummaryWriter` writes on
    a thread that dies silently when the disk is full, and then blocks the run forever. A remote
    file is written to a local temporary folder, and copied at each flush.
    """

    def __init__(self, folder: AnyPath, purge_step: int | None):
        """Create a file in `folder`.

        Args:
          folder: Folder of one split, local or remote.
          purge_step: TensorBoard hides events of this step and later in older files of the folder;
            None hides nothing.

        Raises:
          UserError: The file cannot be created.
        """
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
        """Write the values of one step, by name."""
        from tensorboardX.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(
            value=[
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
            ]
        )
        self._write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

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
