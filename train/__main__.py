"""`python -m train`."""

import io
import sys

from train.allocator import restart_with_huge_pages
from train.cli import COMPUTING, main

if __name__ == "__main__":
    if COMPUTING.intersection(sys.argv[1:2]):
        restart_with_huge_pages()
    if isinstance(sys.stdout, io.TextIOWrapper):  # where it is no UTF-8, signs are spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    main()
