"""Kill a run at random moments and restart it, and compare it with an uninterrupted run.

    python -m bench.drills.resume [--kills 200] [--devices 8] [--processes 2] [--seed 0]

A small model with dropout trains on Python's own library text, on one device, on eight,
and on the devices of two processes. One run is uninterrupted; another is killed (SIGKILL, or one
time in
four a signal to stop) at random moments, again and again, and always restarted by the same command.
It saves every few steps, so that many kills interrupt a save. At the end every loss and every
parameter must be bit-equal.

Each start is a new process, forked from one that has only imported the libraries, because imports
would take most of the time of such short starts.
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

STEPS_PER_KILL = 20
"""Steps of the run per kill."""

SAVE_STEPS_KILLED, SAVE_STEPS_UNINTERRUPTED = 3, 500
"""Steps between saves of the killed run, and of the uninterrupted one."""

PRELOADED = [
    "train.loop",
    "train.parallel.distributed",
    "train.cli.config_verbs",
    "train.tasks.language_modeling",
    "bench.drills",
]
"""Modules imported before forking. None of them starts a JAX backend."""


@dataclasses.dataclass(frozen=True)
class RunProcess:
    """One process of a run."""

    process: BaseProcess
    errors: pathlib.Path
    """File of its standard error."""

    def wait_for_exit(self) -> int:
        """Wait for the process to exit, and return its exit status."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


@dataclasses.dataclass(frozen=True)
class Machine:
    """Number of processes, and of devices over all of them."""

    devices: int
    processes: int

    def start(self, workdir: pathlib.Path, steps: int, every: int) -> list[RunProcess]:
        """Start the run by the user's command, once per process."""
        command = ["fit", "quickstart", "--workdir", str(workdir), *SETTINGS]
        command += [f"--steps={steps}", f"--checkpoint.every={every}"]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        shared = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(self.processes),
        }
        started = []
        for index in range(self.processes):
            environment = shared | {"JAX_PROCESS_ID": str(index)} if self.processes > 1 else {}
            errors = workdir.with_name(f"errors-{index}.txt")
            arguments = (self.devices // self.processes, environment, errors, command)
            process = FORKS.Process(target=run_command_line, args=arguments)
            process.start()
            started.append(RunProcess(process, errors))
        return started

    def __str__(self) -> str:
        return f"{self.devices} devices, {self.processes} processes"


FORKS = multiprocessing.get_context("forkserver")


def run_command_line(
    devices: int, environment: dict[str, str], errors: pathlib.Path, command: list[str]
) -> None:
    """Run the command line in a new process, as `python -m train` does after its imports."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` sets it to ignored
    os.environ.update(environment)
    jax.config.update("jax_num_cpu_devices", devices)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    train.cli.main.main(command)


def run_to_end(machine: Machine, workdir: pathlib.Path, steps: int, every: int) -> None:
    """Run to the end. Raises RuntimeError if the run fails."""
    for process in machine.start(workdir, steps, every):
        if process.wait_for_exit():
            raise RuntimeError(process.errors.read_text())


def kill_repeatedly(
    machine: Machine, workdir: pathlib.Path, kills: int, rng: random.Random
) -> Counter[str]:
    """Kill the run `kills` times, or until it is done. Return how its starts ended."""
    ends: Counter[str] = Counter()
    steps = kills * STEPS_PER_KILL
    for _ in range(kills):
        processes = machine.start(workdir, steps, SAVE_STEPS_KILLED)
        wait_for_random_moment(workdir, processes, rng)
        last_step = last_complete_step(workdir / "metrics.jsonl")
        number = signal.SIGKILL
        if rng.random() < 1 / 4:
            number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        send_signal(rng.choice(processes), number)
        if number == signal.SIGKILL:  # a scheduler kills the other processes too
            for each in processes:
                each.process.kill()
        codes = {each.wait_for_exit() for each in processes}
        if codes == {0}:
            if last_step < steps - STEPS_PER_KILL:
                words = f"{number.name} at step {last_step}: the run continued to its end"
                raise RuntimeError(f"{words}\n{processes[0].errors.read_text()}\n{dict(ends)}")
            ends["done"] += 1
            break
        if number == signal.SIGKILL:
            ends[f"SIGKILL, {interrupted_activity(workdir)}"] += 1
        elif codes == {75}:
            ends[f"{number.name}, saved"] += 1
        elif codes <= {-number, 75, 1, 130} | allowed_abort(machine, codes, number):
            ends[f"{number.name}, at the start"] += 1  # before the first checkpoint
        else:
            raise RuntimeError(
                f"{number.name}: exit status {codes}\n{processes[0].errors.read_text()}"
            )
    return ends


def allowed_abort(machine: Machine, codes: set[int], number: signal.Signals) -> set[int]:
    """Return the exit statuses allowed for a process whose partner died before they connected.

    JAX aborts it then. With a single process, or if none died of the signal, an abort is a finding.
    """
    return {-signal.SIGABRT} if machine.processes > 1 and -number in codes else set()


def send_signal(target: RunProcess, number: signal.Signals) -> None:
    """Send a signal, unless the process has exited."""
    if target.process.is_alive() and target.process.pid is not None:
        os.kill(target.process.pid, number)


def wait_for_random_moment(
    workdir: pathlib.Path, processes: list[RunProcess], rng: random.Random
) -> None:
    """Wait until a random moment: mostly during training, sometimes during startup."""
    if rng.random() < 1 / 8:
        time.sleep(rng.uniform(0, 5))
        return
    metrics, since, last = workdir / "metrics.jsonl", time.time(), None
    while last is None or last_complete_step(metrics) < last:
        if not all(process.process.is_alive() for process in processes):
            return
        if last is None and metrics.exists() and metrics.stat().st_mtime >= since:
            last = last_complete_step(metrics) + rng.uniform(
                0, 2 * STEPS_PER_KILL - SAVE_STEPS_KILLED
            )
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))  # anywhere within a step


def last_complete_step(metrics: pathlib.Path) -> int:
    """Return the step of the last complete line."""
    if not metrics.exists():
        return 0
    lines = metrics.read_text().splitlines(keepends=True)
    complete = [line for line in lines[-2:] if line.endswith("\n")]
    return int(json.loads(complete[-1])["step"]) if complete else 0


def interrupted_activity(workdir: pathlib.Path) -> str:
    """Return the activity that a kill interrupted, judging from the folder."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    if any("tmp" in name for name in names):
        return "in the middle of a save"
    return "between saves"


def losses(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without fields that depend on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in records]


def drill(machine: Machine, kills: int, seed: int) -> bool:
    """Print a table. Return True if nothing differs."""
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, broken = (
            pathlib.Path(folder) / name for name in ("uninterrupted", "broken")
        )
        run_to_end(machine, uninterrupted, kills * STEPS_PER_KILL, SAVE_STEPS_UNINTERRUPTED)
        ends = kill_repeatedly(machine, broken, kills, random.Random(seed))
        run_to_end(machine, broken, kills * STEPS_PER_KILL, SAVE_STEPS_KILLED)
        same_losses = losses(uninterrupted) == losses(broken)
        one, other = (
            jax.tree.leaves(train.load(str(run)).params) for run in (uninterrupted, broken)
        )
        same_weights = all(map(np.array_equal, one, other))
    table = Table("what", "result", title=f"{sum(ends.values())} starts of a run: {machine}")
    for end, count in sorted(ends.items()):
        table.add_row(end, str(count))
    table.add_row("losses of all steps", "equal, bit for bit" if same_losses else "DIFFER")
    table.add_row("final parameters", "equal, bit for bit" if same_weights else "DIFFER")
    Console().print(table)
    return same_losses and same_weights


def main(kills: int = 200, devices: int = 0, processes: int = 0, seed: int = 0) -> None:
    """Print a table for each machine; exit with 1 if anything differs.

    Args:
      kills: Number of kills, over all machines.
      devices: Devices of a single machine to try; 0: all three machines.
      processes: Processes of that machine; 1 if not given.
      seed: Seed of the random moments.
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
