"""Memory of this machine, or of the container that this process runs in. Imports no JAX."""

import os
from pathlib import Path


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return bytes of the machine's memory, or of a container's limit if that is less.

    Args:
      root: Where the system's files are.

    Returns:
      0 where the system does not say.
    """
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory
