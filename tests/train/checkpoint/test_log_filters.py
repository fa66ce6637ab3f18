"""A failed save is reported once; other log records are shown as before."""

import asyncio
import sys
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from train.checkpoint.writer import install_log_filters


def raise_and_catch(file: str) -> Exception:
    """Return an error whose traceback passes through a function of this file."""
    space: dict[str, Any] = {}
    exec(compile("def write():\n    raise OSError(28, 'No space left')", file, "exec"), space)
    with pytest.raises(OSError, match="No space left") as caught:
        space["write"]()
    return caught.value


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError('Error writing "w/0" in /run/checkpoints/8.orbax-checkpoint-tmp/state'), False),
        (raise_and_catch("/packages/orbax/checkpoint/path.py"), False),
        (raise_and_catch("/packages/other/path.py"), True),
        (ValueError("another's"), True),
    ],
    ids=["TensorStore", "Orbax", "another package", "another error"],
)
def test_asyncio_reports_other_errors(
    error: Exception, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    install_log_filters()
    loop = asyncio.new_event_loop()
    loop.create_future().set_exception(error)
    loop.close()
    assert ["never retrieved" in each.getMessage() for each in caplog.records] == [True] * told


def test_python_reports_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    install_log_filters()
    install_log_filters()
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed") as caught:
        loop.call_soon_threadsafe(print)
    by_python = caught.value.__traceback__
    assert by_python is not None

    def raised(error: BaseException, trace: TracebackType | None) -> Any:
        return SimpleNamespace(exc_value=error, exc_traceback=trace)

    by_tensorstore = raised(caught.value, by_python.tb_next)
    others = [
        raised(caught.value, by_python),
        raised(caught.value, None),
        raised(KeyboardInterrupt(), by_python.tb_next),
    ]
    for each in (by_tensorstore, *others):
        sys.unraisablehook(each)
    assert shown == others
