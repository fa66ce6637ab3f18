"""Runs killed at random moments and started again, against one that was left alone.

    python -m bench.drills.resume [--kills 40] [--seed 0]

A small model with dropout trains on the text that every Python carries. One run is unbroken;
another is killed (SIGKILL, or SIGTERM one time in three) after a random time, again and again, and
always started by the same command. At the end every loss and every parameter must be the same, bit
for bit.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train

SETTINGS = (
    "--batch-size=4",
    "--log-every=1",
    "--checkpoint.every=7",
    "--data.limit-bytes=400000",
    "--data.sequence-length=32",
    "--data.tokenizer.vocab-size=512",
    "--model.width=32",
    "--model.layers=2",
    "--model.pattern.0.mixer.heads=2",
    "--model.pattern.0.mixer.kv-heads=1",
    "--model.pattern.0.dropout=0.1",
    "--model.dropout=0.1",
    "--evaluation.every=50",
    "--evaluation.batches=2",
    "--evaluation.no-compressors",
    "--sample.every=0",
    "--quiet",
)

STEPS_A_LIFE = 150
"""Steps of the run for each time that it is killed: a fast machine may be done before."""


def start(workdir: pathlib.Path, steps: int) -> subprocess.Popen[bytes]:
    """The command that a user gives, each time the same."""
    command = [sys.executable, "-m", "train", "fit", "quickstart", "--workdir", str(workdir)]
    return subprocess.Popen([*command, *SETTINGS, f"--steps={steps}"], stderr=subprocess.PIPE)


def finish(workdir: pathlib.Path, steps: int) -> None:
    """Runs to the end. Raises RuntimeError if the run does not end well."""
    process = start(workdir, steps)
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors.decode())


def torment(workdir: pathlib.Path, kills: int, drawn: random.Random) -> dict[str, int]:
    """Kills the run `kills` times, or until it is done. Returns how each life ended."""
    ends: dict[str, int] = {}
    for _ in range(kills):
        process = start(workdir, kills * STEPS_A_LIFE)
        time.sleep(drawn.uniform(3.0, 9.0))
        how = signal.SIGTERM if drawn.random() < 1 / 3 else signal.SIGKILL
        process.send_signal(how)
        process.communicate()
        end = {0: "done", 75: "SIGTERM, saved"}.get(process.returncode, how.name)
        ends[end] = ends.get(end, 0) + 1
        if end == "done":
            break
    return ends


def losses(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in records]


def main(kills: int = 40, seed: int = 0) -> None:
    """Prints a table; exits with 1 if anything differs."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken = (pathlib.Path(folder) / name for name in ("unbroken", "broken"))
        finish(unbroken, kills * STEPS_A_LIFE)
        ends = torment(broken, kills, random.Random(seed))
        finish(broken, kills * STEPS_A_LIFE)
        same_losses = losses(unbroken) == losses(broken)
        one, other = (jax.tree.leaves(train.load(str(run)).params) for run in (unbroken, broken))
        same_weights = all(map(np.array_equal, one, other))
    table = Table("what", "result", title=f"{sum(ends.values())} lives of one run")
    for end, count in ends.items():
        table.add_row(end, str(count))
    table.add_row("losses of all steps", "equal, bit for bit" if same_losses else "DIFFER")
    table.add_row("final parameters", "equal, bit for bit" if same_weights else "DIFFER")
    Console().print(table)
    sys.exit(0 if same_losses and same_weights else 1)


if __name__ == "__main__":
    tyro.cli(main)
