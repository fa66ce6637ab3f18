"""What Orbax and TensorStore say beside the error that we raise: it is kept from the screen."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable

from train.checkpoint.discovery import ORBAX_TMP_MARKER

_ORBAX = f"{os.sep}orbax{os.sep}"


def install_log_filters() -> None:
    """Orbax logs each step of its way, and every failure that we raise with its whole trace.

    Of the parts of a save one fails first, and is what we raise. The others, which nobody waits for
    then, are told by asyncio, or by Python itself. What is not of a save is told as ever.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_a_save)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return _ORBAX not in record.pathname


def _not_of_a_save(record: logging.LogRecord) -> bool:
    """Errors of TensorStore have no trace, but name the folder in which Orbax writes."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    frames = traceback.walk_tb(error.__traceback__)
    through_orbax = any(_ORBAX in frame.f_code.co_filename for frame, _ in frames)
    return not (through_orbax or ORBAX_TMP_MARKER in str(error))


class _Hook:
    """Drops that an event loop is closed if a thread of C++ was told so, and no Python called it.

    So TensorStore ends what it still writes when a save has failed, and its loop has gone with it.
    """

    def __init__(self, tell: Callable[[sys.UnraisableHookArgs], object]):
        self._tell = tell

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        trace = unraisable.exc_traceback
        called = trace.tb_frame.f_code if trace else None
        told = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
        if not (isinstance(unraisable.exc_value, RuntimeError) and called is told):
            self._tell(unraisable)
