"""What is said of a process that can no longer say it."""

from __future__ import annotations

import os
import subprocess
import threading

SHELL = 'read said || echo "$0" >&2'


class LastWords:
    """A line on standard error, if this process ends without having taken it back.

    A shell holds it, and the other end of a pipe: that closes however this process ends. JAX aborts
    one whose process 0 has gone, at once and from a thread of its own (its
    ``missed_heartbeat_callback`` would be asked, but cannot be called: it is given a status that
    has no form in Python).
    """

    def __init__(self, line: str):
        """Leaves the line with the shell."""
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", SHELL, line], stdin=subprocess.PIPE
        )

    def take_back(self) -> None:
        """This process ends by its own will, and has said what there was to say."""
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None:
            return
        try:
            os.write(shell.stdin.fileno(), b"said\n")
            shell.stdin.close()
            shell.wait(timeout=1)
        except (OSError, subprocess.TimeoutExpired):
            return  # it has been ended itself
