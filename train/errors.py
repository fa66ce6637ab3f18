"""Errors meant for a person: one line that names the thing, the problem and the remedy."""


class UserError(Exception):
    """Something the user can put right. The command line prints it as one line and exits with 1.

    Write the message as ``thing: problem; remedy``, for example
    ``data.path /no/such/file: does not exist; give a file or folder of text``.
    """


class UsageError(UserError):
    """The command itself was wrong (an unknown config, field or value). Exit status 2."""
