"""Huge pages for large arrays on CPU.

XLA's CPU backend allocates the temporaries of a step with malloc and frees them afterwards. Blocks
of that size are mapped anew each time: a gigabyte in pages of 4 KiB is a quarter of a million page
faults a step, a quarter of the time of a small model's step. glibc can request pages of 2 MiB
instead (madvise with MADV_HUGEPAGE), but reads this setting, an environment variable, only when a
process starts. Hence the program replaces itself once (`execve`), before it imports anything
large: the process keeps its id, arguments and open files, at the cost of a second start of Python.
"""

import os
import re
import sys
from collections.abc import Mapping

TUNABLES_VARIABLE = "GLIBC_TUNABLES"


HUGE_PAGES_TUNABLE = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with huge pages requested, unless it sets them already."""
    tunables = environment.get(TUNABLES_VARIABLE, "")
    if HUGE_PAGES_TUNABLE in tunables:
        return dict(environment)
    joined = f"{tunables}:{HUGE_PAGES_TUNABLE}=1" if tunables else f"{HUGE_PAGES_TUNABLE}=1"
    return {**environment, TUNABLES_VARIABLE: joined}


def restart_with_huge_pages() -> None:
    """Restart this program with huge pages, if glibc supports them and they are not set yet.

    Returns if nothing is to be done. The restarted program returns here too: the variable is then
    set. Call it before anything large is imported.
    """
    environment = with_huge_pages(os.environ)
    if environment != dict(os.environ) and _supported_by_glibc():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _supported_by_glibc() -> bool:
    """Return True for glibc 2.35 or later, which has the tunable."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        return False
    found = re.match(r"glibc (\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= (2, 35)
