import subprocess
import sys

import pytest

from train.errors import UsageError, UserError
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
    assert last.endswith("is here, and see python -m train doctor")
