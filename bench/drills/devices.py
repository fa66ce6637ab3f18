"""Train on several CPU devices with few cores beside a busy process: no run may abort or hang.

    python -m bench.drills.devices [--runs 10] [--only pmap] [--cores 2] [--limit 600]

XLA's CPU collectives block threads of a pool that all devices share, so programs that starve
each other show here first (`train/engines/engine.py`). A small model trains a few steps on
eight devices, over several meshes and by `pmap`, with evaluations, samples, checkpoints and an
exponential moving average of the weights. At the end it evaluates the whole held-out split: 293
batches. A second process keeps one core busy. Every run of every kind must end without an
error and with the same losses.

A run that takes longer than `--limit` seconds counts as hung and is killed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

import jax
import tyro
from rich.console import Console
from rich.table import Table

SETTINGS = (
    "--seed=5",
    "--steps=20",
    "--batch-size=16",
    "--log-every=1",
    "--data.max-bytes=300000",
    "--data.validation-fraction=0.5",
    "--data.sequence-length=64",
    "--data.tokenizer.kind=byte",
    "--model.d-model=128",
    "--model.num-layers=2",
    "--model.layer-pattern.0.mixer.num-heads=4",
    "--model.layer-pattern.0.mixer.num-kv-heads=2",
    "--ema.decay=0.9",
    "--evaluation.every=10",
    "--evaluation.num-batches=40",
    "--evaluation.batch-size=8",
    "--evaluation.no-compression-baselines",
    "--checkpoint.every=10",
    "--sample.every=10",
    "--sample.max-new-tokens=16",
    "--quiet",
    "--optimizer.kind=adamw",
)

KINDS = {
    "data 8": ("--mesh.data=8",),
    "fsdp 8": ("--mesh.data=1", "--mesh.fsdp=8"),
    "data 2 x fsdp 2 x tensor 2": ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"),
    "data 4 x context 2": ("--mesh.data=4", "--mesh.context=2"),
    "pmap": ("--mesh.data=8", "--compile=pmap"),
}
"""Settings of each way to use eight devices."""

DEVICES = 8

TOLERANCE = 1e-5
"""Largest difference between two runs' losses, in nats: rounding differs from mesh to mesh."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    end: str  # "well", "aborted", "hung" or another exit status
    seconds: float
    losses: tuple[float, ...]  # losses of the evaluations; the last is over the whole split
    warned: bool  # True if XLA warned of a collective that waited for 20 seconds
    errors: str  # the end of its standard error, if it failed


def run_once(kind: str, folder: pathlib.Path, limit: float) -> Outcome:
    """Train once in a new process; return the outcome."""
    workdir = pathlib.Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "train", "fit", "quickstart", f"--workdir={workdir}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    began = time.perf_counter()
    with workdir.with_suffix(".errors").open("w+") as errors:
        process = subprocess.Popen(
            [*command, *SETTINGS, *KINDS[kind]],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            code = process.wait(timeout=limit)
            end = {0: "well", -signal.SIGABRT: "aborted"}.get(code, f"exit status {code}")
        except subprocess.TimeoutExpired:
            end = "hung"
        finally:
            process.kill()
            process.wait()
        seconds = time.perf_counter() - began
        errors.seek(0)
        text = errors.read()
    tail = "" if end == "well" else text[-600:]
    losses = evaluations(workdir / "metrics.jsonl")
    return Outcome(end, seconds, losses, "may be stuck" in text, tail)


def evaluations(metrics: pathlib.Path) -> tuple[float, ...]:
    """Return the losses of a run's evaluations, in order."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    return tuple(float(r["loss"]) for r in records if r.get("split") == "validation")


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def spread(outcomes: list[Outcome], expected: tuple[float, ...]) -> float:
    """Return the largest difference from the expected losses; infinity if some are missing."""
    differences = [0.0]
    for outcome in outcomes:
        if outcome.end == "well":
            if len(outcome.losses) != len(expected):
                return float("inf")
            pairs = zip(outcome.losses, expected, strict=True)
            differences += [abs(one - other) for one, other in pairs]
    return max(differences)


def main(runs: int = 10, only: str = "", cores: int = 2, limit: float = 600.0) -> None:
    """Print a table; exit with 1 if a run failed or its losses differ.

    Args:
      runs: Runs per kind.
      only: Run only the kinds whose names contain this.
      cores: Cores shared by the runs and the busy process. Starvation needs fewer cores than
    devices.
      limit: Seconds after which a run counts as hung.
    """
    kinds = [kind for kind in KINDS if only in kind]
    if not kinds:
        raise SystemExit(f"--only {only}: is in none of {', '.join(KINDS)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, busy_process():
        for number in range(runs):
            for kind in kinds:
                outcome = run_once(kind, pathlib.Path(folder), limit)
                outcomes[kind].append(outcome)
                print(
                    f"{kind} {number + 1}/{runs}: {outcome.end} after {outcome.seconds:.0f} s",
                    outcome.errors,
                    file=sys.stderr,
                    flush=True,
                )
    every = [outcome for kind in kinds for outcome in outcomes[kind]]
    expected = next((outcome.losses for outcome in every if outcome.end == "well"), ())
    table = Table(
        "kind",
        "runs",
        "ended",
        "warned",
        "seconds",
        "losses differ by",
        title=f"jax {jax.__version__}, {DEVICES} devices on {cores} cores beside a busy process",
    )
    for kind in kinds:
        ends = Counter(outcome.end for outcome in outcomes[kind])
        times = [outcome.seconds for outcome in outcomes[kind]]
        table.add_row(
            kind,
            str(runs),
            ", ".join(f"{count} {end}" for end, count in ends.most_common()),
            str(sum(outcome.warned for outcome in outcomes[kind])),
            f"{min(times):.0f} to {max(times):.0f}",
            f"{spread(outcomes[kind], expected):.1e}" if expected else "",
        )
    Console(width=100).print(table)
    good = all(outcome.end == "well" for outcome in every)
    sys.exit(0 if good and spread(every, expected) <= TOLERANCE else 1)


if __name__ == "__main__":
    tyro.cli(main)
