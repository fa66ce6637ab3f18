"""Runs killed at random moments and started again, against one that was left alone.

    python -m bench.drills.resume [--kills 200] [--devices 8] [--processes 2] [--seed 0]

A small model with dropout trains on the text that every Python carries, on one device, on eight,
and on the devices of two processes. One run is unbroken; another is killed (SIGKILL, or a signal to
stop one time in four) at a random moment, again and again, and always started by the same command.
It saves every few steps, so that many kills fall into a save. At the end every loss and every
parameter must be the same, bit for bit.
"""

import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train

SETTINGS = (
    "--batch-size=8",
    "--log-every=1",
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

STEPS_A_LIFE = 40
"""Steps of the run for each time that it is killed: a fast machine may be done before."""

OFTEN, SELDOM = 3, 500
"""Steps between the saves of the run that is killed, and of the one that is not."""

PROGRAM = """
import sys, jax
address, count, index, *command = sys.argv[1:]
if int(count) > 1:
    jax.distributed.initialize(address, int(count), int(index))
from train.cli import main
main(command)
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run has: so many processes, and devices over all of them."""

    devices: int
    processes: int

    def start(self, workdir: pathlib.Path, steps: int, every: int) -> list[subprocess.Popen[bytes]]:
        """The command that a user gives, each time the same, once for each process."""
        command = ["fit", "quickstart", "--workdir", str(workdir), *SETTINGS]
        command += [f"--steps={steps}", f"--checkpoint.every={every}"]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        own = {"JAX_NUM_CPU_DEVICES": str(self.devices // self.processes)}
        return [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, address, str(self.processes), str(i), *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **own},
            )
            for i in range(self.processes)
        ]

    def __str__(self) -> str:
        return f"{self.devices} devices, {self.processes} processes"


def finish(machine: Machine, workdir: pathlib.Path, steps: int, every: int) -> None:
    """Runs to the end. Raises RuntimeError if the run does not end well."""
    for process in machine.start(workdir, steps, every):
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors.decode())


def torment(
    machine: Machine, workdir: pathlib.Path, kills: int, drawn: random.Random
) -> Counter[str]:
    """Kills the run `kills` times, or until it is done. Returns how its lives ended."""
    ends: Counter[str] = Counter()
    for _ in range(kills):
        processes = machine.start(workdir, kills * STEPS_A_LIFE, OFTEN)
        wait(workdir, processes, drawn)
        how = signal.SIGKILL
        if drawn.random() < 1 / 4:
            how = drawn.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        drawn.choice(processes).send_signal(how)
        if how == signal.SIGKILL:  # a scheduler does not leave the others
            for process in processes:
                process.kill()
        errors = [process.communicate()[1] for process in processes]
        codes = {process.returncode for process in processes}
        if codes == {0}:
            ends["done"] += 1
            break
        if how == signal.SIGKILL:
            ends[f"SIGKILL, {moment(workdir)}"] += 1
        elif codes == {75}:
            ends[f"{how.name}, saved"] += 1
        elif codes <= {-how, 75, 1, 130}:  # it came before there was anything to save
            ends[f"{how.name}, at the start"] += 1
        else:
            raise RuntimeError(f"{how.name}: exit status {codes}\n{errors[0].decode()}")
    return ends


def wait(
    workdir: pathlib.Path, processes: list[subprocess.Popen[bytes]], drawn: random.Random
) -> None:
    """Until a random moment: mostly of training, now and then while the run starts."""
    if drawn.random() < 1 / 8:
        time.sleep(drawn.uniform(0, 8))
        return
    metrics, since = workdir / "metrics.jsonl", time.time()
    while not metrics.exists() or metrics.stat().st_mtime < since:
        if any(process.poll() is not None for process in processes):
            return
        time.sleep(0.01)
    time.sleep(drawn.uniform(0, 2))


def moment(workdir: pathlib.Path) -> str:
    """What a kill has interrupted, as its folder tells."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    if any("tmp" in name for name in names):
        return "in the middle of a save"
    steps = [name for name in names if name.isdecimal()]
    if all((workdir / "checkpoints" / step / "manifest.json").exists() for step in steps):
        return "between saves"
    return "before a manifest was written"


def losses(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in records]


def drill(machine: Machine, kills: int, seed: int) -> bool:
    """Prints a table. Returns whether nothing differs."""
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken = (pathlib.Path(folder) / name for name in ("unbroken", "broken"))
        finish(machine, unbroken, kills * STEPS_A_LIFE, SELDOM)
        ends = torment(machine, broken, kills, random.Random(seed))
        finish(machine, broken, kills * STEPS_A_LIFE, OFTEN)
        same_losses = losses(unbroken) == losses(broken)
        one, other = (jax.tree.leaves(train.load(str(run)).params) for run in (unbroken, broken))
        same_weights = all(map(np.array_equal, one, other))
    table = Table("what", "result", title=f"{sum(ends.values())} lives of a run: {machine}")
    for end, count in sorted(ends.items()):
        table.add_row(end, str(count))
    table.add_row("losses of all steps", "equal, bit for bit" if same_losses else "DIFFER")
    table.add_row("final parameters", "equal, bit for bit" if same_weights else "DIFFER")
    Console().print(table)
    return same_losses and same_weights


def main(kills: int = 200, devices: int = 0, processes: int = 0, seed: int = 0) -> None:
    """Prints a table for each machine; exits with 1 if anything differs.

    Args:
      kills: Over all machines.
      devices: Of the one machine that is tried; 0: those of all three.
      processes: Likewise, 1 if not given.
      seed: Of the moments.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    machines = [Machine(1, 1), Machine(8, 1), Machine(2, 2)]
    if devices or processes:
        machines = [Machine(max(devices, processes), max(processes, 1))]
    share = -(-kills // len(machines))
    good = [drill(machine, share, seed + number) for number, machine in enumerate(machines)]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    tyro.cli(main)
