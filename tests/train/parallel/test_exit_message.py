import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal
from train.last_words import LastWords
words = LastWords("error: it's $HOME; `gone`")
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("os.abort()", True),
        ("os._exit(1)", True),
        ("words.take_back(); words.take_back(); os._exit(1)", False),
    ],
)
def test_they_are_said_unless_taken_back(ending: str, said: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending=ending)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode in (1, -signal.SIGKILL, -signal.SIGABRT)
    expected = f"error: it's $HOME; `gone`{os.linesep}" if said else ""
    assert done.stderr == expected
