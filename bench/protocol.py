"""Contender side of the protocol of side-by-side measurements.

Standard library only: a peer's interpreter runs this file without having this project installed.

A contender is a process. It finds its settings, a JSON object, in the last argument of its command
line; it builds, warms up, and from then on every line in and out is one JSON object:

    once, at the start               -> {"ready": {"versions", "facts", "build_seconds"}}
    {"command": "run", "steps": 5}   -> {"seconds": 0.71, "cpu_seconds": 1.36, "loss": 4.17}
    {"command": "quit"}              -> {"peak_memory_bytes": 812345678}
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    # On Linux ru_maxrss survives exec: a small child of a large parent would report its parent.
    status = _status("VmHWM")
    if status is not None:
        return status
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; the peak if unknown."""
    now = _status("VmRSS")
    return peak_resident_bytes() if now is None else now


def _status(name: str) -> int | None:
    """Return one entry of /proc/self/status in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


@dataclass(frozen=True)
class Work:
    """Work that a contender repeats.

    run: runs the given number of steps and returns the last loss, or None. It must not
        return before every result is ready.
    versions: versions of the libraries that do the work.
    facts: facts that show that contenders do the same work, such as the number of parameters.
    peak_memory: in bytes; on an accelerator, give its own counter here.
    """

    run: Callable[[int], float | None]
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    peak_memory: Callable[[], int] = peak_resident_bytes


def serve(build: Callable[[dict[str, Any]], Work]) -> None:
    """Build the work, run ``settings["warmup"]`` steps of it, and answer commands until "quit"."""
    answers = _claim_standard_output()
    settings = json.loads(sys.argv[-1])
    started = time.perf_counter()
    work = build(settings)
    work.run(settings["warmup"])
    build_seconds = time.perf_counter() - started
    ready = {
        "versions": dict(work.versions),
        "facts": dict(work.facts),
        "build_seconds": build_seconds,
    }
    _say(answers, {"ready": ready})
    for line in sys.stdin:
        request = json.loads(line)
        if request["command"] == "quit":
            break
        _say(answers, _timed(work, request["steps"]))
    _say(answers, {"peak_memory_bytes": work.peak_memory()})


def _timed(work: Work, steps: int) -> dict[str, Any]:
    started, cpu_started = time.perf_counter(), time.process_time()
    loss = work.run(steps)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss}


def _claim_standard_output() -> TextIO:
    """Reserve standard output for answers; redirect other prints to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)
