"""Damage checkpoints in every way that disks do: each must be detected and recovered.

    python -m bench.drills.damage [--count 500] [--resumed 8] [--seed 0]

A small run has two checkpoints. In copies of its folder every file of the newer one is truncated,
emptied, deleted, or has one bit flipped at a random position, repeatedly. Detected: the older
checkpoint is restored. Recovered: its state is bit-equal. Some of the copies are resumed to
the end and must reach the final weights of the run.
"""

import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime.local_hardware import local_hardware
from transformer import TransformerConfig

OLDER, NEWER = 4, 8

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


WITHOUT_DATA = ("_CHECKPOINT_METADATA", "commit_success.txt", "manifest/commit_success.txt")
"""Files that Orbax writes after the manifest, and that no restore reads."""


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a checkpoint by relative name, without those that hold no data."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(file for file in files if file.as_posix() not in WITHOUT_DATA)


def apply(kind: str, file: pathlib.Path, drawn: random.Random) -> None:
    """Damage a file without changing files hard-linked to it."""
    data = KINDS[kind](file.read_bytes(), drawn)
    file.unlink()
    if data is not None:
        file.write_bytes(data)


def cases(folder: pathlib.Path, count: int) -> Iterator[tuple[str, pathlib.Path]]:
    """Yield every kind of damage for every file, cyclically; empty files can only be deleted."""
    done = 0
    while done < count:
        for file in files_of(folder):
            for kind in KINDS if (folder / file).stat().st_size else ("deleted",):
                yield kind, file
                done += 1


def experiment(folder: pathlib.Path) -> Experiment:
    """Return a small experiment that takes a second."""
    return Experiment(
        name="damage",
        model=TransformerConfig(d_model=16, num_layers=1, embedding_dropout=0.1),
        data=TextDataConfig(
            path="python:library",
            max_bytes=100_000,
            sequence_length=16,
            tokenizer=TokenizerConfig("byte"),
            cache_dir=str(folder / "cache"),
        ),
        steps=NEWER,
        batch_size=8,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        checkpoint=CheckpointConfig(every=OLDER, keep_last=2),
    )


def copied(run: pathlib.Path, copy: pathlib.Path) -> None:
    """Copy a run's folder; checkpoint files are hard-linked because nothing writes into them."""

    def put(source: str, target: str) -> None:
        if "checkpoints" in pathlib.Path(source).relative_to(run).parts:
            os.link(source, target)
        else:
            shutil.copy(source, target)

    shutil.copytree(run, copy, copy_function=put)


def state_of(run: pathlib.Path, step: int, shapes: Any) -> list[bytes]:
    """Return everything that a checkpoint holds."""
    with CheckpointManager(run / "checkpoints") as checkpoints:
        state = checkpoints.restore(step, shapes).state
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.replace(key=None))]


class Drill:
    """Run whose copies are damaged."""

    def __init__(self, folder: pathlib.Path):
        self.run, self.copy = folder / "run", folder / "copy"
        self.experiment = experiment(folder)
        train.fit(self.experiment, str(self.run), quiet=True)
        saved = read_experiment(RunFolder.open_existing(self.run))
        self.shapes = make_engine(saved, local_hardware()).abstract_state()
        self.older, self.newer = (state_of(self.run, s, self.shapes) for s in (OLDER, NEWER))

    def case(
        self, kind: str, file: pathlib.Path, drawn: random.Random, *, resume: bool
    ) -> list[str]:
        """Return the outcome of one damage."""
        copied(self.run, self.copy)
        apply(kind, self.copy / "checkpoints" / str(NEWER) / file, drawn)
        with CheckpointManager(self.copy / "checkpoints") as checkpoints:
            detected = checkpoints.find_newest_valid().step == OLDER
        ok = ["noticed"] if detected else []
        if detected and state_of(self.copy, OLDER, self.shapes) == self.older:
            ok.append("recovered")
        if resume:
            train.fit(self.experiment, str(self.copy), quiet=True)
            same = state_of(self.copy, NEWER, self.shapes) == self.newer
            ok += ["resumed"] if same else []
        shutil.rmtree(self.copy)
        return ok


def main(count: int = 500, resumed: int = 8, seed: int = 0) -> None:
    """Print a table; exit with 1 if a damage was not detected or not recovered.

    Args:
      count: Number of cases, or slightly more.
      resumed: Number of cases that are trained to the end.
      seed: Seed of the damaged positions.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    drawn = random.Random(seed)
    tried: Counter[str] = Counter()
    well: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        drill = Drill(pathlib.Path(folder))
        planned = list(cases(drill.run / "checkpoints" / str(NEWER), count))
        chosen = set(drawn.sample(range(len(planned)), resumed))
        for number, (kind, file) in enumerate(planned):
            resume = number in chosen
            tried.update([kind, *(["resumed"] if resume else [])])
            ok = drill.case(kind, file, drawn, resume=resume)
            well.update((kind, what) for what in ok)
    sys.exit(show(tried, well))


def show(tried: Counter[str], well: Counter[tuple[str, str]]) -> int:
    """Print the table; return the exit status."""
    table = Table("damage", "cases", "noticed", "recovered", "and resumed to the same end")
    for kind in KINDS:
        results = (str(well[kind, what]) for what in ("noticed", "recovered", "resumed"))
        table.add_row(kind, str(tried[kind]), *results)
    Console().print(table)
    resumed = sum(well[kind, "resumed"] for kind in KINDS)
    all_ok = all(well[k, "noticed"] == well[k, "recovered"] == tried[k] for k in KINDS)
    return 0 if all_ok and resumed == tried["resumed"] else 1


if __name__ == "__main__":
    tyro.cli(main)
