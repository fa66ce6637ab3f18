"""Cores and memory of this host, as far as a container may use them. Needs no JAX."""

import ctypes
import os
import sys
from pathlib import Path


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return bytes of the memory of the machine, or of a container if that is less; 0: unknown."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def count_cores(root: Path = Path("/")) -> int:
    """Return the cores of the process's affinity, or of the container's quota if that is lower."""
    # macOS has no affinity. A container's CPU quota is in /sys, not in the affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, _, period = (root / "sys/fs/cgroup/cpu.max").read_text().strip().partition(" ")
    except OSError:
        return cores
    return min(cores, max(1, int(quota) // int(period))) if quota.isdecimal() else cores


def return_freed_memory() -> None:
    """Return freed memory that malloc keeps to the system (Linux with glibc; else nothing)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
