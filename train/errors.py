"""Errors for users: one line that names the thing, the problem and the remedy.

The command line prints them without a traceback, and exits with status 1 (`UserError`) or 2
(`UsageError`). `as_user_error` and `as_damaged` make them of the errors of other libraries, where a
file is opened and where its content is parsed. `printable` cleans every text that is printed.
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


class EmptyPathError(UsageError):
    """A path of data is empty: its config leaves it to the user, or its run was imported."""


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


@contextlib.contextmanager
def as_usage_errors() -> Iterator[None]:
    """Raise a UsageError in place of a ValueError about a setting."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


_MAX_REASON_LENGTH = 200


@contextlib.contextmanager
def as_damaged(name: str, kind: str, remedy: str) -> Iterator[None]:
    """Raise a UserError in place of whatever a library raises about the content of a file.

    The block holds the call of the parser alone. Parsers of hostile or damaged content raise more
    than they document: RecursionError and OverflowError, MemoryError for a size in a header, or
    the PanicException of Rust's libraries, which is no `Exception`.

    Args:
      name: What was read, as the user knows it.
      kind: What it should be: `JSON`, `an .npz file of arrays`.
      remedy: What to do about it.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{name}: is not {kind} ({short_reason(error)}); {remedy}") from error


def short_reason(error: BaseException) -> str:
    """Return the message of an error on one short line."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _MAX_REASON_LENGTH else f"{line[:_MAX_REASON_LENGTH]}..."


# Names of files, columns and tokens, and what a model generates, may hold any character. Those that
# a terminal would obey (controls, and marks that reverse the direction of writing) are replaced by
# their pictures, or by a mark of replacement where they have none.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F)], 0xFFFD)
_PICTURES |= dict.fromkeys(range(0x2066, 0x206A), 0xFFFD)


def printable(text: str) -> str:
    """Return a text without characters that a terminal would obey."""
    return text.translate(_PICTURES)
