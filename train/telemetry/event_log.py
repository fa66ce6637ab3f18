"""Files of one JSON object a line that only grow, and survive a process that is killed.

What happened to a run and why, one event a line: started, resumed, preempted, finished.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from train.data.files import AnyPath
from train.run_folder.folder import explain_read_errors, explain_write_errors
from train.run_folder.regular_files import (
    MAX_LINE_BYTES,
    MAX_LOG_BYTES,
    iter_lines,
    open_append,
    open_regular,
    read_bytes,
    too_large_error,
)

JsonRecord = dict[str, Any]


def append_records(path: AnyPath, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds a line for each record; all of them are in the file when this returns.

    A line torn by a process that was killed is ended first, so that it spoils no other. Object
    stores cannot append: there the file is read and written whole.

    Raises:
      UserError: The file cannot be written; the lines before are still there.
    """
    lines = "".join(format_line(record) for record in records).encode(errors="backslashreplace")
    with explain_write_errors(path):
        if isinstance(path, pathlib.Path):
            with open_append(path) as file:
                file.write(_newline_after(_last_byte(file)) + lines)
        else:
            before = read_bytes(path, MAX_LOG_BYTES) if path.exists() else b""
            path.write_bytes(before + _newline_after(before[-1:]) + lines)


def read_records(path: AnyPath) -> list[JsonRecord]:
    """The records of a file, in order; torn lines are left out, and a missing file has none."""
    parsed = (parse_line(line) for line in read_raw_lines(path))
    return [record for record in parsed if record is not None]


def read_raw_lines(path: AnyPath) -> list[str]:
    """The lines of a file without what ends them, torn ones too; a missing file has none.

    Raises:
      UserError: It is no regular file, or too long for a log, or has a line that is.
    """
    found, size = [], 0
    with explain_read_errors(path), contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(open_regular(path))
        except FileNotFoundError:
            return []
        for line in iter_lines(stream, path, MAX_LINE_BYTES):
            size += len(line)
            if size > MAX_LOG_BYTES:
                raise too_large_error(path, size, MAX_LOG_BYTES)
            text = line.decode(errors="replace").removesuffix("\n")
            if text.strip():
                found.append(text)
    return found


def parse_line(line: str) -> JsonRecord | None:
    """The object that a line holds; None if it holds none, being torn."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def format_line(record: Mapping[str, Any]) -> str:
    """One line of valid JSON. Floats read back as they were.

    JSON has no NaN and no infinities: they become the strings "NaN", "Infinity" and "-Infinity",
    which ``float`` understands. Scalars of NumPy and JAX become numbers, and what JSON does not
    know (a path, a dtype) becomes its ``str``.
    """
    return json.dumps(_plain(dict(record)), allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return value if isinstance(value, str | int | float | None) else str(value)


def _last_byte(file: Any) -> bytes:
    if not file.seek(0, os.SEEK_END):
        return b""
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _newline_after(last: bytes) -> bytes:
    return b"" if last in (b"", b"\n") else b"\n"


class EventLog:
    """The logbook of a run. One process writes it; it only ever grows."""

    def __init__(self, path: AnyPath):
        self.path = path

    def write(self, event: str, **what: Any) -> None:
        """Adds a line: the time (UTC), the event, and what there is to say of it.

        Args:
          event: One or two words: "started", "resumed", "fell back", "finished".
          **what: ``step``, ``why`` and whatever else helps the reader; see `train.telemetry.event_log.format_line`
            for what can be written.

        Raises:
          UserError: The file cannot be written.
        """
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        append_records(self.path, [{"time": time, "event": event, **what}])

    def read(self) -> list[JsonRecord]:
        """All events, oldest first."""
        return read_records(self.path)
