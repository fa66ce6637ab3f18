"""Ownership of a run's folder: killed and restarted, in a local folder and as in an object store.

    python -m bench takeover [--kills 3]

A run is killed (SIGKILL) again and again, and immediately restarted by the same command: under a
lock of the operating system it must start immediately, and as in an object store it must wait until
the owner's record counts as dead. While it trains, a second process is started by the same command:
it must be rejected, the run must not notice, and at its end its losses must equal those of an
uninterrupted run.
"""

import re
import tempfile
import time
from pathlib import Path

from bench.drills.faults import SMALL_RUN, Fit, train_losses

STEPS = 3_000

SETTINGS = (
    *SMALL_RUN,
    "--batch-size=64",
    "--data.sequence-length=64",
    "--model.d-model=64",
    "--model.num-layers=1",
    "--evaluation.every=0",
    "--checkpoint.every=50",
    f"--steps={STEPS}",
)

IN_OBJECT_STORE = """
import train.run_folder.lock
train.run_folder.lock._lock = train.run_folder.lock.RemoteOwner
from train.cli.main import main
main()
"""

PROGRAMS = {"local": ("-m", "train"), "object store": ("-c", IN_OBJECT_STORE)}
"""What trains in each kind of folder."""


def wait_for_steps(workdir: Path, more: int) -> float:
    """Wait for `more` further steps; return the seconds until the first of them."""
    began, before, first = time.monotonic(), max(train_losses(workdir), default=0), 0.0
    while (now := max(train_losses(workdir), default=0)) < min(before + more, STEPS):
        first = first or (time.monotonic() - began if now > before else 0.0)
        time.sleep(0.1)
    return first or time.monotonic() - began


def check_refusal(second: Fit) -> str:
    """Return how a second process ended; it must be refused."""
    began = time.monotonic()
    status, error = second.wait(), second.error_text().strip()
    if status != 1 or not re.search(r"is in use by process \d+ on .*; stop", error):
        raise SystemExit(f"a second process was not refused: {status} {error}")
    return f"refused after {time.monotonic() - began:.0f} s"


def drill(kills: int = 3) -> None:
    """Kill, restart and compare; exit with an error if anything is wrong.

    Args:
      kills: Number of kills.
    """
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = Path(folder, "whole")
        Fit(uninterrupted, SETTINGS).wait()
        for kind, program in PROGRAMS.items():
            killed = Path(folder, kind)
            run = Fit(killed, SETTINGS, program=program)
            for _ in range(kills):
                wait_for_steps(killed, 30)
                end = check_refusal(Fit(killed, SETTINGS, program=program))
                print(f"{kind}: second process {end}", flush=True)
                run.kill()
                run.wait()
                run = Fit(killed, SETTINGS, program=program)
                waited = wait_for_steps(killed, 1)
                print(f"{kind}: killed, restarted; steps again after {waited:.0f} s", flush=True)
            if run.wait():
                raise SystemExit(f"the run ended with {run.returncode}: {run.error_text()}")
            if train_losses(killed) != train_losses(uninterrupted):
                raise SystemExit("the losses are not those of the run that was left alone")
            print(f"{kind}: all {STEPS} losses are those of the run that was left alone")
