"""Keep Orbax's and TensorStore's own reports of a failed save off the screen.

The trainer raises one line for a failed save. Without these filters, Orbax logs every stage and
each failure with its traceback. Of the items of a save one fails first; the failures of the others
reach asyncio's logger or `sys.unraisablehook`, because nobody awaits them any more.

There is no setting in Orbax for it, so the filters are process-wide. They drop only records that
come from Orbax or name its temporary folders. `train.fit` and `train.load` install them;
constructing a `CheckpointManager` does not.
"""

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable

from train.checkpoint.discovery import ORBAX_TMP_MARKER

_ORBAX_PATH = f"{os.sep}orbax{os.sep}"


def install_log_filters() -> None:
    """Install the filters in this process; a second call changes nothing."""
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_about_a_save)
    if not isinstance(sys.unraisablehook, _UnraisableFilter):
        sys.unraisablehook = _UnraisableFilter(sys.unraisablehook)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return _ORBAX_PATH not in record.pathname


def _is_not_about_a_save(record: logging.LogRecord) -> bool:
    """Return False for the error of a save that asyncio reports as never retrieved."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    frames = traceback.walk_tb(error.__traceback__)
    through_orbax = any(_ORBAX_PATH in frame.f_code.co_filename for frame, _ in frames)
    # Errors that TensorStore raises from C++ have no traceback, but name the folder.
    return not (through_orbax or ORBAX_TMP_MARKER in str(error))


class _UnraisableFilter:
    """Unraisable hook that drops "event loop is closed" errors of TensorStore's C++ threads.

    When a save fails, its event loop is closed while TensorStore still writes. The C++ thread
    then calls `call_soon_threadsafe` on the closed loop, with no Python frame above it.
    """

    def __init__(self, previous: Callable[["sys.UnraisableHookArgs"], object]):
        self._previous = previous

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        trace = unraisable.exc_traceback
        outermost = trace.tb_frame.f_code if trace else None
        from_cpp = outermost is asyncio.BaseEventLoop.call_soon_threadsafe.__code__
        if not (from_cpp and isinstance(unraisable.exc_value, RuntimeError)):
            self._previous(unraisable)
