"""Event log of a run, and the JSON lines files that it and the other logs are written to.

A JSON lines file holds one JSON object a line and only grows. It survives a process that is killed
while writing: readers skip a torn line, and the next writer ends it.

`installed_versions` and `peak_memory_bytes` are what the logs record about the process itself.
"""

import datetime
import json
import math
import os
import pathlib
import platform
import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from train.errors import as_user_error
from train.files import AnyPath
from train.runtime.accelerators import installed_version
from train.runtime.writing import explain_write_errors

JsonRecord = dict[str, Any]


class EventLog:
    """Events of a run, one a line: started, resumed, preempted, finished. One process writes it."""

    def __init__(self, path: AnyPath):
        self.path = path

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with the current time (UTC).

        Args:
          event: One or two words, such as "started", "resumed", "fell back" or "finished".
          **fields: `step`, `reason` and other values; `format_line` says which are allowed.

        Raises:
          UserError: The file cannot be written.
        """
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        append_records(self.path, [{"time": time, "event": event, **fields}])

    def read(self) -> list[JsonRecord]:
        """Return all events, oldest first."""
        return read_records(self.path)


def append_records(path: AnyPath, records: Iterable[Mapping[str, Any]]) -> None:
    """Append a line for each record (`append_text`)."""
    append_text(path, "".join(format_line(record) for record in records))


def append_text(path: AnyPath, text: str) -> None:
    """Append whole lines to a file. All of them are there when this returns.

    Object stores cannot append, so a remote file is read and written whole.

    Raises:
      UserError: The file cannot be written; earlier lines are intact.
    """
    data = text.encode(errors="backslashreplace")
    with explain_write_errors(path):
        if isinstance(path, pathlib.Path):
            with path.open("a+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                file.write(_line_end(file.read()) + data)
        else:
            before = path.read_bytes() if path.exists() else b""
            path.write_bytes(before + _line_end(before[-1:]) + data)


def _line_end(last_byte: bytes) -> bytes:
    """Return what ends a line that a killed process has torn, so that it spoils no other."""
    return b"" if last_byte in (b"", b"\n") else b"\n"


def read_records(path: AnyPath) -> list[JsonRecord]:
    """Return the records of a file in order, without torn lines; none of a missing file."""
    parsed = (parse_line(line) for line in read_raw_lines(path))
    return [record for record in parsed if record is not None]


def read_raw_lines(path: AnyPath) -> list[str]:
    """Return the lines of a file without their ends, torn ones too; none of a missing file."""
    with as_user_error(str(path)):
        try:
            text = path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return []
    return [line for line in text.split("\n") if line.strip()]


def parse_line(line: str) -> JsonRecord | None:
    """Return the object on a line; None for a torn or damaged line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def format_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of valid JSON. Floats read back exactly.

    JSON has no NaN and no infinities. They become the strings "NaN", "Infinity" and "-Infinity",
    which `float` parses. Scalars of NumPy and JAX become numbers, and other types their `str`.
    """
    return json.dumps(_to_plain(dict(record)), allow_nan=False, ensure_ascii=False) + "\n"


def finite_or_none(value: Any) -> Any:
    """Return plain data with None in place of NaN and infinities, for programs that read JSON."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return value if isinstance(value, str | int | float | None) else str(value)


PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "linen-transformer")
"""Packages whose versions matter for a run's numbers."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, the operating system and the packages that are installed."""
    found = {name: version for name in PACKAGES if (version := installed_version(name))}
    return {"python": platform.python_version(), "system": platform.platform(), **found}


def peak_memory_bytes() -> dict[str, int]:
    """Return the largest memory so far of this process, and of its first device if it says."""
    peaks = {}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peaks["device"] = int(statistics["peak_bytes_in_use"])
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return peaks | {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
