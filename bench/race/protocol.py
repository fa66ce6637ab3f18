"""Contender's side of a race.

Standard library only: a peer's interpreter runs this file without having this project installed.

A contender is a process. It finds its settings, a JSON object, in the last argument of its command
line; it builds, warms up, and from then on a line in is a number of steps, and a line out is one
JSON object:

    at the start   -> {}
    5              -> {"seconds": 0.71, "cpu_seconds": 1.36, "loss": 4.17}
    0, at the end  -> {"peak_memory_bytes": 812345678, "facts": {"parameters": 9}}
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def status_bytes(name: str) -> int:
    """Return an entry of /proc/self/status, such as `VmRSS`, in bytes; 0 on other systems."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    # Not ru_maxrss, which survives exec: a small child of a large parent would report its parent.
    return status_bytes("VmHWM")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return status_bytes("VmRSS")


@dataclass(frozen=True)
class Work:
    """Work that a contender repeats.

    run: runs the given number of steps and returns the last loss, or None. It must not
        return before every result is ready.
    facts: versions of the libraries that do the work, and what shows that contenders do the same
        work, such as the number of parameters. They are read at the end.
    peak_memory: in bytes; on an accelerator, give its own counter here.
    """

    run: Callable[[int], float | None]
    facts: Mapping[str, int | str] = field(default_factory=dict)
    peak_memory: Callable[[], int] = peak_resident_bytes


def serve(build: Callable[[dict[str, Any]], Work]) -> None:
    """Build the work, run ``settings["warmup"]`` steps of it, and answer until the end."""
    # Standard output is for answers; what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    settings = json.loads(sys.argv[-1])
    work = build(settings)
    if settings["warmup"]:
        work.run(settings["warmup"])
    say({})
    while steps := int(sys.stdin.readline() or 0):
        started, cpu_started = time.perf_counter(), time.process_time()
        loss = work.run(steps)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        say({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss})
    say({"peak_memory_bytes": work.peak_memory(), "facts": dict(work.facts)})
