import subprocess
import sys

import pytest

from train.errors import UsageError, UserError, as_damaged, printable
from train.runtime.signals import PreemptedError


@pytest.mark.parametrize("kind", [UserError, UsageError, PreemptedError])
def test_notebook_shows_one_line(kind: type[Exception]) -> None:
    """IPython asks the error what to show instead of a traceback."""
    shell = pytest.importorskip("IPython.core.interactiveshell")
    error = kind("data.path x: does not exist; give another")
    shown: list[str] = []

    class Shell(shell.InteractiveShell):  # type: ignore[name-defined]
        def _showtraceback(self, etype: object, evalue: object, stb: list[str]) -> None:
            shown.extend(stb)

    try:
        raise error
    except kind:
        Shell(user_ns={}).showtraceback()
    assert shown == [f"{kind.__name__}: data.path x: does not exist; give another"]


def test_missing_platform_is_one_line() -> None:
    program = "from train.runtime.local_hardware import local_hardware; local_hardware()"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"JAX_PLATFORMS": "rocm", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("train.errors.UserError: devices: JAX has none (")
    assert last.endswith("and see python -m train doctor")


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("kind", [RecursionError, OverflowError, MemoryError, PanicException])
def test_errors_of_parsers_are_one_line(kind: type[BaseException]) -> None:
    with (
        pytest.raises(UserError, match=r"^a\.json: is not JSON \(two lines\); fetch it again$"),
        as_damaged("a.json", "JSON", "fetch it again"),
    ):
        raise kind("two\nlines")


def test_interrupt_of_a_parser_is_not_an_error_of_the_file() -> None:
    with pytest.raises(KeyboardInterrupt), as_damaged("a.json", "JSON", "fetch it again"):
        raise KeyboardInterrupt


def test_printed_text_has_no_terminal_commands() -> None:
    assert printable("a\x1b[2J\x7f\x9b\u202eb\n\tü") == "a␛[2J␡\ufffd\ufffdb\n\tü"
