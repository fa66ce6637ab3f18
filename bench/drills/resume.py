"""Kill a run at random moments and restart it, and compare it with an uninterrupted run.

    python -m bench resume [--kills 200] [--only "2 processes"]

A small model with dropout trains on Python's own library text, on one device, on eight,
and on the devices of two processes. One run is uninterrupted; another is killed (SIGKILL, or one
time in four a signal to stop) at random moments, again and again, and always restarted by the same
command. It saves every few steps, so that many kills interrupt a save. At the end every loss and
every parameter must be bit-equal.
"""

import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import train
from bench.drills.faults import SMALL_RUN, Fit, train_losses
from train.telemetry.metrics_log import read_metrics

SETTINGS = (
    *SMALL_RUN,
    "--batch-size=8",
    "--data.sequence-length=32",
    "--model.d-model=32",
    "--model.num-layers=2",
    "--model.layer-pattern.0.residual-dropout=0.1",
    "--model.embedding-dropout=0.1",
    "--evaluation.every=50",
)

STEPS_PER_KILL = 20
"""Steps of the run per kill."""

SAVE_STEPS_KILLED, SAVE_STEPS_UNINTERRUPTED = 3, 500
"""Steps between saves of the killed run, and of the uninterrupted one."""


class Machine(NamedTuple):
    """Number of processes, and of devices over all of them."""

    devices: int
    processes: int

    def start(self, workdir: Path, steps: int, every: int) -> list[Fit]:
        """Start the run by the user's command, once per process."""
        settings = (*SETTINGS, f"--steps={steps}", f"--checkpoint.every={every}")
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        shared = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(self.processes),
        }
        return [
            Fit(
                workdir,
                settings,
                devices=self.devices // self.processes,
                environment=shared | {"JAX_PROCESS_ID": str(index)} if self.processes > 1 else {},
            )
            for index in range(self.processes)
        ]

    def __str__(self) -> str:
        return f"{self.devices} devices, {self.processes} processes"


MACHINES = (Machine(1, 1), Machine(8, 1), Machine(2, 2))


def run_to_end(machine: Machine, workdir: Path, steps: int, every: int) -> None:
    """Run to the end. Raises RuntimeError if the run fails."""
    for process in machine.start(workdir, steps, every):
        if process.wait():
            raise RuntimeError(process.error_text())


def kill_repeatedly(
    machine: Machine, workdir: Path, kills: int, rng: random.Random
) -> Counter[str]:
    """Kill the run `kills` times, or until it is done. Return how its starts ended."""
    ends: Counter[str] = Counter()
    steps = kills * STEPS_PER_KILL
    for _ in range(kills):
        processes = machine.start(workdir, steps, SAVE_STEPS_KILLED)
        wait_for_random_moment(workdir, processes, rng)
        last_step = max(train_losses(workdir), default=0)
        number = signal.SIGKILL
        if rng.random() < 1 / 4:
            number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        rng.choice(processes).send_signal(number)
        if number == signal.SIGKILL:  # a scheduler kills the other processes too
            for each in processes:
                each.kill()
        codes = {each.wait() for each in processes}
        if codes == {0}:
            if last_step < steps - STEPS_PER_KILL:
                raise RuntimeError(f"{number.name} at step {last_step}: the run continued")
            ends["done"] += 1
            break
        if number == signal.SIGKILL:
            saving = any("tmp" in path.name for path in (workdir / "checkpoints").glob("*"))
            ends[f"SIGKILL, {'in the middle of a save' if saving else 'between saves'}"] += 1
            continue
        if codes == {75}:
            ends[f"{number.name}, saved"] += 1
            continue
        allowed = {-number, 75, 1, 130}  # before the first checkpoint
        if machine.processes > 1 and -number in codes:
            # JAX aborts a process whose partner died before they connected.
            allowed.add(-signal.SIGABRT)
        if not codes <= allowed:
            raise RuntimeError(f"{number.name}: exit status {codes}\n{processes[0].error_text()}")
        ends[f"{number.name}, at the start"] += 1
    return ends


def wait_for_random_moment(workdir: Path, processes: list[Fit], rng: random.Random) -> None:
    """Wait until a random moment: mostly during training, sometimes during startup."""
    if rng.random() < 1 / 8:
        time.sleep(rng.uniform(0, 5))
        return
    metrics, since, last = workdir / "metrics.jsonl", time.time(), None
    while last is None or max(train_losses(workdir), default=0) < last:
        if any(process.poll() is not None for process in processes):
            return
        if last is None and metrics.exists() and metrics.stat().st_mtime >= since:
            more = rng.uniform(0, 2 * STEPS_PER_KILL - SAVE_STEPS_KILLED)
            last = max(train_losses(workdir), default=0) + more
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))  # anywhere within a step


def metrics_of(workdir: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without the field that depends on the clock."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def compare(machine: Machine, kills: int) -> bool:
    """Print a table. Return True if nothing differs."""
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, broken = Path(folder, "uninterrupted"), Path(folder, "broken")
        run_to_end(machine, uninterrupted, kills * STEPS_PER_KILL, SAVE_STEPS_UNINTERRUPTED)
        ends = kill_repeatedly(machine, broken, kills, random.Random(str(machine)))
        run_to_end(machine, broken, kills * STEPS_PER_KILL, SAVE_STEPS_KILLED)
        same_losses = metrics_of(uninterrupted) == metrics_of(broken)
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


def drill(kills: int = 200, only: str = "") -> int:
    """Print a table for each machine; return 1 if anything differs.

    Args:
      kills: Number of kills, over all machines.
      only: Try only the machines with this in their description, as `1 devices`.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The shell's `&` leaves it ignored, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    machines = [machine for machine in MACHINES if only in str(machine)]
    good = [compare(machine, -(-kills // len(machines))) for machine in machines]
    return int(not all(good))
