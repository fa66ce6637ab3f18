"""Being asked to stop: the step under way is finished, a checkpoint saved, and the run ends."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from train.errors import PlainError


class PreemptedError(PlainError):
    """The run was told to stop; its checkpoint is saved. The command line exits with 75."""


class StopRequest:
    """While entered, SIGTERM and SIGINT set `.signal`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # only the main thread may; elsewhere signals are left alone
                return self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = signal.Signals(number).name
