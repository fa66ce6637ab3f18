"""Ownership of a run's folder: killed and restarted, in a local folder and as in an object store.

    python -m bench.drills.takeover [--kills 3]

A run is killed (SIGKILL) again and again, and immediately restarted by the same command: under a
lock of the operating system it must start immediately, and as in an object store it must wait until
the owner's record counts as dead. While it trains, a second process is started by the same command:
it must be rejected, the run must not notice, and at its end its losses must equal those of an
uninterrupted run.
"""

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import tyro

STEPS = 3_000

SETTINGS = (
    "--batch-size=64",
    "--log-every=1",
    "--data.max-bytes=400000",
    "--data.sequence-length=64",
    "--data.tokenizer.vocab-size=512",
    "--model.d-model=64",
    "--model.num-layers=1",
    "--model.layer-pattern.0.mixer.num-heads=2",
    "--model.layer-pattern.0.mixer.num-kv-heads=1",
    "--evaluation.every=0",
    "--evaluation.num-batches=2",
    "--evaluation.no-compression-baselines",
    "--sample.every=0",
    "--checkpoint.every=50",
    f"--steps={STEPS}",
)

PROGRAM = """
import sys
import train.run_folder.lock
if sys.argv.pop(1) == "object store":
    train.run_folder.lock._lock = train.run_folder.lock.RemoteOwner
from train.cli.main import main
main()
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command-line options."""

    kills: int = 3
    """Number of kills."""


def start(workdir: pathlib.Path, kind: str) -> subprocess.Popen[str]:
    """Start the run in a folder of a kind: `local`, or `object store`."""
    command = ["fit", "quickstart", "--workdir", str(workdir), *SETTINGS]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, *command], stderr=subprocess.PIPE, text=True
    )


def losses(workdir: pathlib.Path) -> dict[int, float]:
    """Return the training losses by step."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    result = [json.loads(line) for line in lines]
    return {line["step"]: line["loss"] for line in result if line["split"] == "train"}


def wait_for_steps(workdir: pathlib.Path, more: int) -> float:
    """Wait for `more` further steps; return the seconds until the first of them."""
    began, before, first = time.monotonic(), max(losses(workdir), default=0), 0.0
    while (now := max(losses(workdir), default=0)) < min(before + more, STEPS):
        first = first or (time.monotonic() - began if now > before else 0.0)
        time.sleep(0.1)
    return first or time.monotonic() - began


def refused(workdir: pathlib.Path, kind: str) -> str:
    """Start a second process, and return how it ended."""
    began = time.monotonic()
    second = start(workdir, kind)
    error = second.communicate()[1].strip().splitlines()[-1]
    if second.returncode != 1 or not re.search(r"is in use by process \d+ on .*; stop", error):
        raise SystemExit(f"a second process was not refused: {second.returncode} {error}")
    return f"refused after {time.monotonic() - began:.0f} s"


def main() -> None:
    """Kill, restart and compare; exit with an error if anything is wrong."""
    kills = tyro.cli(Arguments, description=__doc__).kills
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = pathlib.Path(folder, "whole")
        start(uninterrupted, "local").communicate()
        for kind in ("local", "object store"):
            killed = pathlib.Path(folder, kind)
            run = start(killed, kind)
            for _ in range(kills):
                wait_for_steps(killed, 30)
                print(f"{kind}: second process {refused(killed, kind)}", flush=True)
                run.send_signal(signal.SIGKILL)
                run.wait()
                run = start(killed, kind)
                waited = wait_for_steps(killed, 1)
                print(f"{kind}: killed, restarted; steps again after {waited:.0f} s", flush=True)
            error = run.communicate()[1]
            if run.returncode:
                raise SystemExit(f"the run ended with {run.returncode}: {error}")
            if losses(killed) != losses(uninterrupted):
                raise SystemExit("the losses are not those of the run that was left alone")
            print(f"{kind}: all {STEPS} losses are those of the run that was left alone")


if __name__ == "__main__":
    main()
