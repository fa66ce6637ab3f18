"""Description of the machine that figures are measured on."""

import functools
import os
import platform
import subprocess
from pathlib import Path


def cores() -> int:
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, str | int]:
    """Return the processor, its cores, the GPU if there is one, and the system, for the record."""
    gpu = gpu_name()
    accelerator = {"gpu": gpu} if gpu else {}
    return {"cpu": _cpu_model(), "cores": cores(), **accelerator, "system": platform.platform()}


def trained_on() -> str:
    """Return what JAX trains on here: NVIDIA's GPU, or the processor."""
    return gpu_name() or _cpu_model()


@functools.cache
def gpu_name() -> str:
    """Return the names of NVIDIA's GPUs here; empty without any. It starts no backend."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return ", ".join(found.stdout.split("\n")[:-1]) if found.returncode == 0 else ""


@functools.cache
def commit() -> str:
    """Return the commit of the code, with a mark if files differ from it.

    Results in docs/results may differ: what runs writes them.
    """

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return found.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/results"
    )
    return f"{name or 'unknown'}{'-dirty' if changed else ''}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
