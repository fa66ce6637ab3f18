"""Large pages for large arrays.

XLA's CPU backend takes a step's temporaries from malloc and gives them back after it. Arrays of
that size are mapped anew each time, and a gigabyte in pages of 4 KiB is a quarter of a million
page faults a step: a quarter of the time of a small model's step. glibc can ask the kernel for
pages of 2 MiB in their place (MADV_HUGEPAGE), but reads that wish only when a process starts.
"""

import os
import re
import sys
from collections.abc import Mapping

TUNABLES_VARIABLE = "GLIBC_TUNABLES"


HUGE_PAGES_TUNABLE = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with large pages asked for; what it says of them already stands."""
    tunables = environment.get(TUNABLES_VARIABLE, "")
    if HUGE_PAGES_TUNABLE in tunables:
        return dict(environment)
    joined = f"{tunables}:{HUGE_PAGES_TUNABLE}=1" if tunables else f"{HUGE_PAGES_TUNABLE}=1"
    return {**environment, TUNABLES_VARIABLE: joined}


def restart_with_huge_pages() -> None:
    """Starts this program over with large pages, where glibc knows of them; else returns.

    The process stays the same one. To be called before anything large is imported.
    """
    wanted = with_huge_pages(os.environ)
    if wanted != dict(os.environ) and _glibc_knows():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def _glibc_knows() -> bool:
    """Whether the C library is glibc 2.35 or later."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        return False
    found = re.match(r"glibc (\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= (2, 35)
