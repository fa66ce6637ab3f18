import time
import weakref

import pytest

from train.cli.interrupts import heeded


class Thing:
    """Something that can be referred to weakly."""


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_an_interruption_that_python_ignores_comes_again() -> None:
    with heeded():
        thing = Thing()
        reference = weakref.ref(thing, interrupted)
        del thing
        assert reference() is None  # what the callback raised did not get here
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_errors_that_python_ignores_are_told_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: told.append(what.exc_type))

    def failing(_: object) -> None:
        raise ValueError

    with heeded():
        thing = Thing()
        reference = weakref.ref(thing, failing)
        del thing
    assert reference() is None
    assert told == [ValueError]
