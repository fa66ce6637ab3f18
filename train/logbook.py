"""What happened to a run and why, one event a line: started, resumed, preempted, finished."""

from __future__ import annotations

import datetime
from typing import Any

from train import jsonl
from train.data.files import AnyPath


class Logbook:
    """The logbook of a run. One process writes it; it only ever grows."""

    def __init__(self, path: AnyPath):
        self.path = path

    def write(self, event: str, **what: Any) -> None:
        """Adds a line: the time (UTC), the event, and what there is to say of it.

        Args:
          event: One or two words: "started", "resumed", "fell back", "finished".
          **what: ``step``, ``why`` and whatever else helps the reader; see `train.jsonl.to_line`
            for what can be written.

        Raises:
          UserError: The file cannot be written.
        """
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        jsonl.append(self.path, [{"time": time, "event": event, **what}])

    def read(self) -> list[jsonl.Record]:
        """All events, oldest first."""
        return jsonl.read(self.path)
