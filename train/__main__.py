"""`python -m train`."""

import io
import sys

from train.cli.main import HELP_FLAGS, MODEL_VERBS, main
from train.runtime.allocator import restart_with_huge_pages
from train.runtime.standard_error import make_stderr_lenient

if __name__ == "__main__":
    make_stderr_lenient()
    # Help computes nothing, and need not wait for a second start of Python.
    if MODEL_VERBS.intersection(sys.argv[1:2]) and HELP_FLAGS.isdisjoint(sys.argv):
        restart_with_huge_pages()
    if isinstance(sys.stdout, io.TextIOWrapper):  # where it is no UTF-8, signs are spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    main()
