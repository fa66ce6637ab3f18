"""Damage checkpoints in every way that disks do: each must be detected and recovered.

    python -m bench damage [--count 500]

A small run has two checkpoints. In copies of its folder every file of the newer one is truncated,
emptied, deleted, or has one bit flipped at a random position, repeatedly. Detected: the older
checkpoint is restored. Recovered: its state is bit-equal. One copy of each kind of damage is
resumed to the end and must reach the final weights of the run.
"""

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import train
from bench.drills.faults import tiny
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.experiment import CheckpointConfig
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime.local_hardware import local_hardware

OLDER, NEWER = 4, 8

WITHOUT_DATA = ("_CHECKPOINT_METADATA", "commit_success.txt", "manifest/commit_success.txt")
"""Files that Orbax writes after the manifest, and that no restore reads."""

Damage = Callable[[bytes, random.Random], bytes | None]
"""(file bytes, random generator) -> other bytes, or None to delete the file."""


def truncated(data: bytes, drawn: random.Random) -> bytes:
    """Truncate the file, to at least one byte if possible."""
    return data[: drawn.randrange(min(1, len(data) - 1), len(data))]


def flipped(data: bytes, drawn: random.Random) -> bytes:
    """Flip one bit."""
    position, bit = drawn.randrange(len(data)), drawn.randrange(8)
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


KINDS: dict[str, Damage] = {
    "truncated": truncated,
    "emptied": lambda data, drawn: b"",
    "deleted": lambda data, drawn: None,
    "one bit flipped": flipped,
}


def apply(kind: str, file: Path, drawn: random.Random) -> None:
    """Damage a file."""
    data = KINDS[kind](file.read_bytes(), drawn)
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)


def cases(folder: Path, count: int) -> Iterator[tuple[str, Path]]:
    """Yield every kind of damage for every file, cyclically; empty files can only be deleted."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    done = 0
    while done < count:
        for file in files:
            if file.as_posix() not in WITHOUT_DATA:
                for kind in KINDS if (folder / file).stat().st_size else ("deleted",):
                    yield kind, file
                    done += 1


def state_of(run: Path, step: int, shapes: Any) -> list[bytes]:
    """Return everything that a checkpoint holds."""
    with CheckpointManager(run / "checkpoints") as checkpoints:
        state = checkpoints.restore(step, shapes).state
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.replace(key=None))]


def drill(count: int = 500) -> int:
    """Print a table; return 1 if a damage was not detected or not recovered.

    Args:
      count: Number of cases, or slightly more.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    drawn = random.Random(0)
    tried: Counter[str] = Counter()
    well: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        run, copy = Path(name, "run"), Path(name, "copy")
        checkpoint = CheckpointConfig(every=OLDER, keep_last=2)
        experiment = tiny(Path(name), steps=NEWER, checkpoint=checkpoint)
        train.fit(experiment, str(run), quiet=True)
        saved = read_experiment(RunFolder.open_existing(run))
        shapes = make_engine(saved, local_hardware()).abstract_state()
        older, newer = (state_of(run, step, shapes) for step in (OLDER, NEWER))
        planned = list(cases(run / "checkpoints" / str(NEWER), count))
        chosen = {
            drawn.choice([n for n, (kind, _) in enumerate(planned) if kind == each])
            for each in KINDS
        }
        for number, (kind, file) in enumerate(planned):
            shutil.copytree(run, copy)
            apply(kind, copy / "checkpoints" / str(NEWER) / file, drawn)
            tried[kind] += 1
            with CheckpointManager(copy / "checkpoints") as checkpoints:
                detected = checkpoints.find_newest_valid().step == OLDER
            well[kind, "detected"] += detected
            well[kind, "recovered"] += detected and state_of(copy, OLDER, shapes) == older
            if number in chosen:
                train.fit(experiment, str(copy), quiet=True)
                well[kind, "resumed"] += state_of(copy, NEWER, shapes) == newer
            shutil.rmtree(copy)
    table = Table("damage", "cases", "noticed", "recovered", "and resumed to the same end")
    for kind in KINDS:
        results = (str(well[kind, what]) for what in ("detected", "recovered", "resumed"))
        table.add_row(kind, str(tried[kind]), *results)
    Console().print(table)
    all_well = all(well[k, "detected"] == well[k, "recovered"] == tried[k] for k in KINDS)
    return int(not all_well or sum(well[kind, "resumed"] for kind in KINDS) != len(chosen))
