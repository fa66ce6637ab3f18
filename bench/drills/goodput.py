"""The useful share of a run's time when it is killed again and again.

    python -m bench.drills.goodput [--every 60] [--config quickstart] [-- --steps 600 ...]

The command that a user gives, killed (SIGKILL) `--every` seconds after each start, and started
again, until it comes to its end. Then what all that time went into, and how long it took from the
start of a process to its first step where the programs were compiled before (the median, and the
longest of all lives but the first).
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
from rich.table import Table

from train.run_folder.folder import RunFolder
from train.telemetry.event_log import JsonRecord
from train.telemetry.goodput import (
    ACTIVITY_DESCRIPTIONS,
    compute_goodput,
    format_duration,
    read_time_records,
)


def run_killed(command: Sequence[str], every: float) -> int:
    """Start a command until it ends well. Returns how often it was killed."""
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
    """Seconds from the start of each life to the end of its first step, oldest first."""
    lives = {line["began"]: line["seconds"] for line in lines}
    return [sum(lives[b][w] for w in ("start", "restore", "compile")) for b in sorted(lives)]


def main(
    settings: tyro.conf.Positional[tuple[str, ...]] = (),
    config: str = "quickstart",
    every: float = 60.0,
) -> None:
    """Print what a run's time went into.

    Args:
      settings: Of the config, after `--`.
      config: What is trained.
      every: Seconds that a life lasts.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "train", "fit", config, "--workdir", folder, "--quiet"]
        kills = run_killed([*command, *settings], every)
        lines = read_time_records(RunFolder(pathlib.Path(folder)).time_log)
    found, starts = compute_goodput(lines), to_first_step(lines)
    table = Table("what", "share", "time", "", title=f"{config}, killed {kills} times")
    for what, seconds in found.seconds.items():
        share = f"{seconds / found.total:.1%}"
        table.add_row(what, share, format_duration(seconds), ACTIVITY_DESCRIPTIONS[what])
    table.add_row(
        "all",
        "",
        format_duration(found.total),
        f"lives that came to their first step: {len(starts)}",
    )
    Console().print(table)
    if again := starts[1:]:
        median, most = statistics.median(again), max(again)
        print(f"restart to first step: median {median:.1f} s, most {most:.1f} s")


if __name__ == "__main__":
    tyro.cli(main)
