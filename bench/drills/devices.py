"""Train on several CPU devices with few cores beside a busy process: no run may abort or hang.

    python -m bench devices [--runs 10]

XLA's CPU collectives block threads of a pool that all devices share, so programs that starve
each other show here first (`train/engines/engine.py`). A small model trains a few steps on
eight devices, over several meshes and by `pmap`, with evaluations, samples, checkpoints and an
exponential moving average of the weights. At the end it evaluates the whole held-out split: 293
batches. A second process keeps one core busy. Every run of every kind must end without an
error and with the same losses.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from bench.drills.faults import Fit
from train.telemetry.metrics_log import read_metrics

DEVICES = 8

CORES = 2
"""Shared by the runs and the busy process. Starvation needs fewer cores than devices."""

SECONDS = 600
"""A run that takes longer counts as hung."""

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

TOLERANCE = 1e-5
"""Largest difference between two runs' losses, in nats: rounding differs from mesh to mesh."""


class Outcome(NamedTuple):
    """Outcome of one run."""

    end: str  # "well", "aborted", "hung" or another exit status
    seconds: float
    losses: list[float]  # losses of the evaluations; the last is over the whole split
    warned: bool  # True if XLA warned of a collective that waited for 20 seconds
    errors: str  # the end of its standard error, if it failed


def run_once(kind: str, folder: Path) -> Outcome:
    """Train once in a new process; return the outcome."""
    workdir = Path(tempfile.mkdtemp(dir=folder))
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    began = time.perf_counter()
    process = Fit(workdir, (*SETTINGS, *KINDS[kind]), devices=DEVICES, environment=compiled)
    try:
        code = process.wait(timeout=SECONDS)
        end = {0: "well", -signal.SIGABRT: "aborted"}.get(code, f"exit status {code}")
    except subprocess.TimeoutExpired:
        end = "hung"
    finally:
        process.kill()
        process.wait()
    seconds, text = time.perf_counter() - began, process.error_text()
    metrics = read_metrics(workdir / "metrics.jsonl")
    losses = [line["loss"] for line in metrics if line["split"] == "validation"]
    return Outcome(end, seconds, losses, "may be stuck" in text, "" if end == "well" else text)


def spread(outcomes: list[Outcome], expected: list[float]) -> float:
    """Return the largest difference from the expected losses; infinity if some are missing."""
    losses = [outcome.losses for outcome in outcomes if outcome.end == "well"]
    if any(len(each) != len(expected) for each in losses):
        return float("inf")
    pairs = (pair for each in losses for pair in zip(each, expected, strict=True))
    return max((abs(one - other) for one, other in pairs), default=0.0)


def drill(runs: int = 10) -> int:
    """Print a table; return 1 if a run failed or its losses differ.

    Args:
      runs: Runs per kind.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(runs):
                for kind, own in outcomes.items():
                    own.append(run_once(kind, Path(folder)))
                    end = f"{own[-1].end} after {own[-1].seconds:.0f} s {own[-1].errors[-600:]}"
                    print(f"{kind} {number + 1}/{runs}: {end}", file=sys.stderr, flush=True)
    finally:
        busy.kill()
    every = [outcome for own in outcomes.values() for outcome in own]
    expected = next((outcome.losses for outcome in every if outcome.end == "well"), [])
    title = f"jax {jax.__version__}, {DEVICES} devices on {CORES} cores beside a busy process"
    table = Table("kind", "runs", "ended", "warned", "seconds", "losses differ by", title=title)
    for kind, own in outcomes.items():
        ends = Counter(outcome.end for outcome in own)
        times = [outcome.seconds for outcome in own]
        table.add_row(
            kind,
            str(runs),
            ", ".join(f"{count} {end}" for end, count in ends.most_common()),
            str(sum(outcome.warned for outcome in own)),
            f"{min(times):.0f} to {max(times):.0f}",
            f"{spread(own, expected):.1e}" if expected else "",
        )
    Console(width=100).print(table)
    good = all(outcome.end == "well" for outcome in every)
    return int(not good or spread(every, expected) > TOLERANCE)
