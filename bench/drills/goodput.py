"""Fraction of useful time of a run that is killed again and again.

    python -m bench.drills.goodput [--every 60] [--config quickstart] [-- --steps 600 ...]

The command that a user gives is killed (SIGKILL) `--every` seconds after each start and started
again, until it finishes. Prints what all that time was spent on, and the time from the
start of a process to its first step when the programs were compiled before (the median and the
maximum over all starts but the first).
"""

import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import tyro
from rich.console import Console

from train.run_folder.folder import RunFolder
from train.telemetry.event_log import JsonRecord
from train.telemetry.goodput import compute_goodput, goodput_table, read_time_records


def run_killed(command: Sequence[str], every: float) -> int:
    """Run a command until it succeeds. Return how often it was killed."""
    for kills in itertools.count():
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=every)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode:
            raise RuntimeError(errors)
        return kills
    raise AssertionError


def to_first_step(lines: Sequence[JsonRecord]) -> list[float]:
    """Return the seconds from each start to the end of its first step, oldest first."""
    starts = {line["began"]: line["seconds"] for line in lines}
    return [
        sum(starts[start][activity] for activity in ("start", "restore", "compile"))
        for start in sorted(starts)
    ]


def main(
    settings: tyro.conf.Positional[tuple[str, ...]] = (),
    config: str = "quickstart",
    every: float = 60.0,
) -> None:
    """Print what a run's time was spent on.

    Args:
      settings: Settings of the config, after `--`.
      config: Config to train.
      every: Seconds from each start to the kill.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "train", "fit", config, "--workdir", folder, "--quiet"]
        kills = run_killed([*command, *settings], every)
        lines = read_time_records(RunFolder(pathlib.Path(folder)).time_log)
    result, starts = compute_goodput(lines), to_first_step(lines)
    table = goodput_table(result)
    table.title = f"{config}, killed {kills} times"
    Console().print(table)
    print(f"starts that reached their first step: {len(starts)}")
    if restarts := starts[1:]:
        median, slowest = statistics.median(restarts), max(restarts)
        print(f"restart to first step: median {median:.1f} s, max {slowest:.1f} s")


if __name__ == "__main__":
    tyro.cli(main)
