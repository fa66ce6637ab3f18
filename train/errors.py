"""Errors for users: one line that names the thing, the problem and the remedy.

The command line prints them without a traceback, and exits with status 1 (`UserError`) or 2
(`UsageError`).
"""

import contextlib
from collections.abc import Iterator


class NoTracebackError(Exception):
    """Error whose message is complete. Notebooks show it without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints instead of a traceback (a hook of IPython)."""
        return [f"{type(self).__name__}: {self}"]


class UserError(NoTracebackError):
    """Problem that the user can correct. Exit status 1.

    Write the message as ``thing: problem; remedy``, for example
    ``data.path /no/such/file: does not exist; give a file or folder of text``.
    """


class UsageError(UserError):
    """Wrong command or setting: an unknown config, field or value. Exit status 2."""


@contextlib.contextmanager
def as_user_error(name: str) -> Iterator[None]:
    """Raise a UserError that names a path in place of the errors of reading it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{name}: {reason}; check the path and its permissions") from error
    except ImportError as error:  # a remote file system needs a package that is not installed
        raise UserError(f"{name}: {error}; then try again") from error
