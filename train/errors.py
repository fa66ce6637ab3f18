"""Errors meant for a person: one line that names the thing, the problem and the remedy."""


class NoTracebackError(Exception):
    """An error whose words say all: a notebook shows them without a trace of where it came from."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UserError(NoTracebackError):
    """Something the user can put right. The command line prints it as one line and exits with 1.

    Write the message as ``thing: problem; remedy``, for example
    ``data.path /no/such/file: does not exist; give a file or folder of text``.
    """


class UsageError(UserError):
    """The command itself was wrong (an unknown config, field or value). Exit status 2."""
