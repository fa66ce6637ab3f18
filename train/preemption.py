"""Being asked to stop: the step under way is finished, a checkpoint saved, and the run ends."""

import itertools
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

from train.errors import PlainError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers and people stop a run with; SLURM warns with USR1 if asked (--signal=USR1@60)."""

_asked = itertools.count(1)
"""How often this process has asked whether to stop: all processes have, as often, at each step."""


class PreemptedError(PlainError):
    """The run was told to stop; its checkpoint is saved. The command line exits with 75."""


class StopRequest:
    """While entered, `SIGNALS` ask the run to stop; a second one ends the process at once.

    Where several processes train together, JAX passes the notice of one to all, and they stop after
    the same step. It hears SIGTERM itself; the other signals are made into one.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}
        self._together = False

    def __enter__(self) -> Self:
        import jax  # whoever asks what a verb does need not wait for it

        self._together = jax.process_count() > 1
        for number in SIGNALS:
            if self._together and number == signal.SIGTERM:
                continue
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

    def asked(self) -> str | None:
        """By what the run was asked to stop after this step; every step has to ask.

        JAX has all processes stop at the count after the largest that any has come to, and only
        there. So they do not count from the step that a run goes on from: a notice that comes
        before the first would name a count that is never reached.
        """
        if not self._together:
            return self.signal
        from jax.experimental import multihost_utils

        reached = multihost_utils.reached_preemption_sync_point(next(_asked))
        return (self.signal or signal.SIGTERM.name) if reached else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = signal.Signals(number).name
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)
