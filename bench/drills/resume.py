"""Run killed at random moments and started again, against one that was left alone.

    python -m bench.drills.resume [--kills 200] [--devices 8] [--processes 2] [--seed 0]

A small model with dropout trains on the text that every Python carries, on one device, on eight,
and on the devices of two processes. One run is unbroken; another is killed (SIGKILL, or a signal to
stop one time in four) at a random moment, again and again, and always started by the same command.
It saves every few steps, so that many kills fall into a save. At the end every loss and every
parameter must be the same, bit for bit.

Each life is a process of its own, forked from one that has imported the libraries and nothing more:
that is most of what a life so short would do.
"""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
import train.cli.main

SETTINGS = (
    "--batch-size=8",
    "--log-every=1",
    "--data.max-bytes=400000",
    "--data.sequence-length=32",
    "--data.tokenizer.vocab-size=512",
    "--model.d-model=32",
    "--model.num-layers=2",
    "--model.layer-pattern.0.mixer.num-heads=2",
    "--model.layer-pattern.0.mixer.num-kv-heads=1",
    "--model.layer-pattern.0.residual-dropout=0.1",
    "--model.embedding-dropout=0.1",
    "--evaluation.every=50",
    "--evaluation.num-batches=2",
    "--evaluation.no-compression-baselines",
    "--sample.every=0",
    "--quiet",
)

STEPS_A_LIFE = 20
"""Steps of the run for each time that it is killed."""

OFTEN, SELDOM = 3, 500
"""Steps between the saves of the run that is killed, and of the one that is not."""

PRELOADED = [
    "train.loop",
    "train.parallel.distributed",
    "train.cli.config_verbs",
    "train.tasks.language_modeling",
    "bench.drills",
]
"""Modules that lives are born with. None of them starts a backend of JAX."""


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of a run."""

    process: BaseProcess
    errors: pathlib.Path
    """File of its standard error."""

    def ended(self) -> int:
        """Wait for its end, and returns its exit status."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


@dataclasses.dataclass(frozen=True)
class Machine:
    """Number of processes, and of devices over all of them."""

    devices: int
    processes: int

    def start(self, workdir: pathlib.Path, steps: int, every: int) -> list[Life]:
        """The command that a user gives, each time the same, once for each process."""
        command = ["fit", "quickstart", "--workdir", str(workdir), *SETTINGS]
        command += [f"--steps={steps}", f"--checkpoint.every={every}"]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        together = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(self.processes),
        }
        lives = []
        for index in range(self.processes):
            environment = together | {"JAX_PROCESS_ID": str(index)} if self.processes > 1 else {}
            errors = workdir.with_name(f"errors-{index}.txt")
            own = (self.devices // self.processes, environment, errors, command)
            process = FORKS.Process(target=live, args=own)
            process.start()
            lives.append(Life(process, errors))
        return lives

    def __str__(self) -> str:
        return f"{self.devices} devices, {self.processes} processes"


FORKS = multiprocessing.get_context("forkserver")


def live(
    devices: int, environment: dict[str, str], errors: pathlib.Path, command: list[str]
) -> None:
    """Run the command line in a new process, as `python -m train` does after its imports."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    os.environ.update(environment)
    jax.config.update("jax_num_cpu_devices", devices)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    train.cli.main.main(command)


def finish(machine: Machine, workdir: pathlib.Path, steps: int, every: int) -> None:
    """Run to the end. Raises RuntimeError if the run does not end well."""
    for life in machine.start(workdir, steps, every):
        if life.ended():
            raise RuntimeError(life.errors.read_text())


def torment(
    machine: Machine, workdir: pathlib.Path, kills: int, drawn: random.Random
) -> Counter[str]:
    """Kill the run `kills` times, or until it is done. Returns how its lives ended."""
    ends: Counter[str] = Counter()
    steps = kills * STEPS_A_LIFE
    for _ in range(kills):
        lives = machine.start(workdir, steps, OFTEN)
        wait(workdir, lives, drawn)
        last_step = newest(workdir / "metrics.jsonl")
        how = signal.SIGKILL
        if drawn.random() < 1 / 4:
            how = drawn.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        send(drawn.choice(lives), how)
        if how == signal.SIGKILL:  # a scheduler does not leave the others
            for life in lives:
                life.process.kill()
        codes = {life.ended() for life in lives}
        if codes == {0}:
            if last_step < steps - STEPS_A_LIFE:
                words = f"{how.name} at step {last_step}: the run continued to its end"
                raise RuntimeError(f"{words}\n{lives[0].errors.read_text()}\n{dict(ends)}")
            ends["done"] += 1
            break
        if how == signal.SIGKILL:
            ends[f"SIGKILL, {moment(workdir)}"] += 1
        elif codes == {75}:
            ends[f"{how.name}, saved"] += 1
        elif codes <= {-how, 75, 1, 130} | abandoned(machine, codes, how):
            ends[f"{how.name}, at the start"] += 1  # before there was anything to save
        else:
            raise RuntimeError(f"{how.name}: exit status {codes}\n{lives[0].errors.read_text()}")
    return ends


def abandoned(machine: Machine, codes: set[int], how: signal.Signals) -> set[int]:
    """Exit statuses of a process whose partner was killed by the signal before they had met.

    JAX aborts it then. Alone, or where none died of the signal, an abort is a finding.
    """
    return {-signal.SIGABRT} if machine.processes > 1 and -how in codes else set()


def send(life: Life, how: signal.Signals) -> None:
    """Sends a signal, unless the process is gone."""
    if life.process.is_alive() and life.process.pid is not None:
        os.kill(life.process.pid, how)


def wait(workdir: pathlib.Path, lives: list[Life], drawn: random.Random) -> None:
    """Until a random moment: mostly of training, now and then while the run starts."""
    if drawn.random() < 1 / 8:
        time.sleep(drawn.uniform(0, 5))
        return
    metrics, since, last = workdir / "metrics.jsonl", time.time(), None
    while last is None or newest(metrics) < last:
        if not all(life.process.is_alive() for life in lives):
            return
        if last is None and metrics.exists() and metrics.stat().st_mtime >= since:
            last = newest(metrics) + drawn.uniform(0, 2 * STEPS_A_LIFE - OFTEN)
        time.sleep(0.01)
    time.sleep(drawn.uniform(0, 0.1))  # anywhere in a step, too


def newest(metrics: pathlib.Path) -> int:
    """The step of the last line that is whole."""
    if not metrics.exists():
        return 0
    lines = metrics.read_text().splitlines(keepends=True)
    whole = [line for line in lines[-2:] if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def moment(workdir: pathlib.Path) -> str:
    """Return the activity that a kill interrupted, judging from the folder."""
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
    """Print a table. Returns whether nothing differs."""
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
    """Print a table for each machine; exits with 1 if anything differs.

    Args:
      kills: Over all machines.
      devices: Of the one machine that is tried; 0: those of all three.
      processes: Likewise, 1 if not given.
      seed: Of the moments.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    FORKS.set_forkserver_preload(PRELOADED)
    machines = [Machine(1, 1), Machine(8, 1), Machine(2, 2)]
    if devices or processes:
        machines = [Machine(max(devices, processes), max(processes, 1))]
    share = -(-kills // len(machines))
    good = [drill(machine, share, seed + number) for number, machine in enumerate(machines)]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    tyro.cli(main)
