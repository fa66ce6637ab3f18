import contextlib
import signal
import time
import weakref
from collections.abc import Iterator
from types import FrameType

import pytest

from train.runtime.signals import reliable_keyboard_interrupt

RETRY_SECONDS = 0.2


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.runtime.signals.RETRY_SECONDS", RETRY_SECONDS)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Restore the default handler: shells ignore Ctrl-C in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Thing:
    """Object that can be weakly referenced."""


def ctrl_c(_: object = None) -> None:
    signal.raise_signal(signal.SIGINT)


def in_a_callback() -> None:
    """Raise in a callback, where Python ignores exceptions."""
    thing = Thing()
    reference = weakref.ref(thing, ctrl_c)
    del thing
    assert reference() is None


def in_what_drops_errors() -> None:
    with contextlib.suppress(BaseException):
        ctrl_c()


@pytest.mark.parametrize("where", [in_a_callback, in_what_drops_errors])
def test_lost_interrupt_is_repeated(where: object) -> None:
    assert callable(where)
    with reliable_keyboard_interrupt():
        where()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)


def test_converted_interrupt_counts() -> None:
    def convert() -> None:
        try:
            ctrl_c()
        except KeyboardInterrupt:
            raise ValueError("cache keys should be comparable") from None

    with pytest.raises(KeyboardInterrupt), reliable_keyboard_interrupt():
        convert()
    with pytest.raises(ValueError, match="cache keys"), reliable_keyboard_interrupt():
        raise ValueError("cache keys")


def test_cleanup_is_not_interrupted() -> None:
    clean = []

    def work() -> None:
        try:
            ctrl_c()
        finally:
            time.sleep(3 * RETRY_SECONDS)
            clean.append(True)

    with pytest.raises(KeyboardInterrupt), reliable_keyboard_interrupt():
        work()
    assert clean


def test_started_run_is_interrupted_once() -> None:
    """A second interrupt would end it immediately."""
    asked = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    with reliable_keyboard_interrupt():
        in_what_drops_errors()
        before = signal.signal(signal.SIGINT, note)
        time.sleep(4 * RETRY_SECONDS)
        signal.signal(signal.SIGINT, before)
    assert asked == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_interrupt_is_not_repeated() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with reliable_keyboard_interrupt():
            ctrl_c()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_unraisable_errors_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: reported.append(what.exc_type))

    def failing(_: object) -> None:
        raise ValueError

    with reliable_keyboard_interrupt():
        thing = Thing()
        reference = weakref.ref(thing, failing)
        del thing
    assert reference() is None
    assert reported == [ValueError]
