"""Entry point of `python -m train VERB ...` and of the console script `linen-transformer`.

Set-up of the process happens here, before JAX is imported; everything else is `train.cli.main`.
"""

import io
import logging
import sys

from train.cli.main import HELP_FLAGS, MODEL_VERBS, main
from train.runtime.startup import (
    LenientStream,
    make_stderr_lenient,
    restart_with_huge_pages,
)


def run() -> None:
    """Run the command line and exit."""
    make_stderr_lenient()
    # Warnings as plain lines, ours and those of libraries; absl's prefix names the module. The
    # stream looks up `sys.stderr` each time, which a progress bar replaces.
    logging.basicConfig(format="%(message)s", stream=LenientStream())
    # glibc reads the setting for huge pages only when a process starts.
    # Verbs that run no model, and help, do not pay for a second start of Python.
    if MODEL_VERBS.intersection(sys.argv[1:2]) and HELP_FLAGS.isdisjoint(sys.argv):
        restart_with_huge_pages()
    # A terminal without UTF-8 shows other characters as escapes instead of failing.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    main()


if __name__ == "__main__":
    run()
