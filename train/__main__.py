"""`python -m train`."""

import io
import os
import sys

from train.allocator import restart_with_huge_pages
from train.cli import COMPUTING, HELP, main

if __name__ == "__main__":
    # Help computes nothing, and need not wait for a second start of Python.
    if COMPUTING.intersection(sys.argv[1:2]) and HELP.isdisjoint(sys.argv):
        restart_with_huge_pages()
    if getattr(sys, "stdout", None) is None:
        # Closed by the caller (>&-): the next file that is opened would take its place, and what
        # libraries print would end up in it.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # where it is no UTF-8, signs are spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    main()
