"""`python -m train`."""

import sys

from train.allocator import restart_with_huge_pages
from train.cli import COMPUTING, main

if __name__ == "__main__":
    if COMPUTING.intersection(sys.argv[1:2]):
        restart_with_huge_pages()
    main()
