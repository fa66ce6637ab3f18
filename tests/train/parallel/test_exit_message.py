import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal
from train.parallel.distributed import ExitMessage
message = ExitMessage("error: it's $HOME; `gone`")
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "printed"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("os.abort()", True),
        ("os._exit(1)", True),
        ("message.cancel(); message.cancel(); os._exit(1)", False),
    ],
)
def test_the_message_is_printed_unless_cancelled(ending: str, printed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending=ending)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode in (1, -signal.SIGKILL, -signal.SIGABRT)
    expected = f"error: it's $HOME; `gone`{os.linesep}" if printed else ""
    assert done.stderr == expected
