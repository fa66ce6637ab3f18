"""Fraction of useful time of a run that is killed again and again.

    python -m bench goodput [--every 60] [-- --steps 600 ...]

`fit quickstart` is killed (SIGKILL) `--every` seconds after each start and started
again, until it finishes. Prints what all that time was spent on, and the time from the
start of a process to its first step when the programs were compiled before (the median and the
maximum over all starts but the first).
"""

import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from bench.drills.faults import Fit
from train.run_folder.folder import RunFolder
from train.telemetry.goodput import compute_goodput, goodput_table, read_time_records


def run_killed(workdir: Path, settings: Sequence[str], every: float) -> int:
    """Start a run until it succeeds. Return how often it was killed."""
    kills = 0
    while True:
        process = Fit(workdir, settings)
        try:
            if process.wait(timeout=every):
                raise RuntimeError(process.error_text())
            return kills
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1


def drill(
    settings: tyro.conf.Positional[tuple[str, ...]] = (),
    every: float = 60.0,
) -> None:
    """Print what a run's time was spent on.

    Args:
      settings: Settings of `quickstart`, after `--`.
      every: Seconds from each start to the kill.
    """
    with tempfile.TemporaryDirectory() as folder:
        kills = run_killed(Path(folder), ["--quiet", *settings], every)
        lines = read_time_records(RunFolder(Path(folder)).time_log)
    table = goodput_table(compute_goodput(lines))
    table.title = f"quickstart, killed {kills} times"
    Console().print(table)
    starts = {line["began"]: line["seconds"] for line in lines}
    restarts = [
        sum(starts[start][activity] for activity in ("start", "restore", "compile"))
        for start in sorted(starts)[1:]
    ]
    if restarts:
        median, slowest = statistics.median(restarts), max(restarts)
        print(f"restart to first step: median {median:.1f} s, max {slowest:.1f} s")
