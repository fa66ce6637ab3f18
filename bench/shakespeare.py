"""Train the character model of Shakespeare here and in nanoGPT, in turns.

    python bench/shakespeare.py --data input.txt --nanogpt ~/nanoGPT --torch-python ~/bin/python

Ours is ``python -m train fit shakespeare_char_cpu``, nanoGPT's is the command that its README gives
for a laptop. Wall time is that of the whole process: imports, compilation, evaluation and
checkpoints included. Both losses are over the whole validation text, the last tenth.
"""

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import tyro
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.contender import ROOT, interpreter
from bench.machine import machine
from bench.side_by_side import spread
from train.errors import UserError

NANOGPT_TRAIN = (
    "train.py",
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--eval_iters=20",
    "--log_interval=1",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--max_iters=2000",
    "--lr_decay_iters=2000",
    "--dropout=0.0",
)


@dataclass(frozen=True)
class Options:
    """Train the character model of Shakespeare here and in nanoGPT, in turns."""

    data: Path
    """tiny Shakespeare, as one text file."""
    nanogpt: Path
    """A checkout of nanoGPT; it is copied, not touched."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and what nanoGPT needs."""
    rounds: int = 3
    """Number of trainings per side."""
    seed: int = 0
    """Seed of the order of turns."""
    json: bool = False
    """Print one JSON object in place of a table."""


@dataclass(frozen=True)
class Run:
    """One training: wall time, and nats per character over the whole validation text.

    reported: the last validation loss that the trainer itself printed, if any.
    """

    seconds: float
    loss: float
    reported: float | None = None


def train_ours(options: Options, folder: Path) -> Run:
    """Train and evaluate on the command line, as a user does."""
    work = str(folder / "run")
    fit = [
        "fit",
        "shakespeare_char_cpu",
        "--workdir",
        work,
        "--data.path",
        str(options.data.resolve()),
    ]
    command = [sys.executable, "-m", "train"]
    seconds, _ = timed([*command, *fit], ROOT, folder / "fit.log")
    _, answer = timed([*command, "evaluate", work, "--json"], ROOT, folder / "evaluate.log")
    return Run(seconds, json.loads(answer)["loss"])


def train_nanogpt(options: Options, folder: Path, checkout: Path) -> Run:
    """Train in a prepared copy, and evaluate the best checkpoint, which is the one it keeps."""
    python = interpreter(options.torch_python)
    train = [python, *NANOGPT_TRAIN, f"--out_dir={folder}"]
    seconds, log = timed(train, checkout, folder / "train.log")
    tokens = checkout / "data/shakespeare_char/val.bin"
    measure = [python, "-m", "bench.peers.nanogpt_loss"]
    measure += [str(checkout), str(folder / "ckpt.pt"), str(tokens)]
    _, answer = timed(measure, ROOT, folder / "loss.log")
    return Run(seconds, json.loads(answer.splitlines()[-1])["loss"], last_reported(log))


def last_reported(log: str) -> float | None:
    """Return the last validation loss in nanoGPT's output."""
    losses = re.findall(r"val loss ([\d.]+)", log)
    return float(losses[-1]) if losses else None


def timed(command: Sequence[str], folder: Path, errors: Path) -> tuple[float, str]:
    """Run a command in a folder; return its wall time in seconds and its standard output.

    Raises UserError, with the last line of its standard error, if it fails.
    """
    started = time.perf_counter()
    with errors.open("w") as stderr:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
        )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        last_output = (errors.read_text().strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"{' '.join(command)}: ended with status {done.returncode} ({last_output}); "
            f"run it in {folder} to see all of it"
        )
    return seconds, done.stdout


def prepare(options: Options, folder: Path) -> Path:
    """Return a copy of nanoGPT with our text prepared in its own way."""
    if not options.data.is_file():
        raise UserError(f"--data {options.data}: is not a file; give tiny Shakespeare's input.txt")
    data = Path("data/shakespeare_char")
    if not (options.nanogpt / data / "prepare.py").is_file():
        raise UserError(f"--nanogpt {options.nanogpt}: has no {data}; give a checkout of nanoGPT")
    checkout = folder / "nanoGPT"
    leave = shutil.ignore_patterns(".git", "out-*", "*.bin", "*.pkl")
    shutil.copytree(options.nanogpt, checkout, ignore=leave)
    shutil.copyfile(options.data, checkout / data / "input.txt")
    prepare_data = [interpreter(options.torch_python), str(data / "prepare.py")]
    timed(prepare_data, checkout, folder / "prepare.log")
    return checkout


def compete(options: Options) -> dict[str, list[Run]]:
    """Return both sides' runs, one per round, in random order."""
    runs: dict[str, list[Run]] = {"ours": [], "nanoGPT": []}
    shuffled = random.Random(options.seed).sample
    waiting = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        checkout = prepare(options, Path(scratch))
        for turn in range(options.rounds):
            for name in shuffled(list(runs), len(runs)):
                folder = Path(scratch) / f"{name}-{turn}"
                folder.mkdir()
                with waiting.status(f"{name}, round {turn + 1} of {options.rounds}"):
                    if name == "ours":
                        run = train_ours(options, folder)
                    else:
                        run = train_nanogpt(options, folder, checkout)
                runs[name].append(run)
    return runs


def table(runs: dict[str, list[Run]]) -> Table:
    """Return the comparison as a table; a ratio above 1 is faster than nanoGPT."""
    base = runs["nanoGPT"]
    reported = base[-1].reported
    caption = None if reported is None else f"nanoGPT itself reports {reported}, from 20 batches"
    shown = Table(title=f"Shakespeare by characters, {len(base)} rounds", caption=caption)
    shown.add_column("")
    for heading in ("wall time", "speed of nanoGPT", "quartiles", "validation loss"):
        shown.add_column(heading, justify="right")
    for name, own in runs.items():
        ratio, (first, third) = spread(
            [b.seconds / o.seconds for b, o in zip(base, own, strict=True)]
        )
        shown.add_row(
            name,
            f"{median(run.seconds for run in own):.1f} s",
            f"{ratio:.2f}",
            f"{first:.2f}-{third:.2f}",
            f"{median(run.loss for run in own):.4f}",
        )
    return shown


def main(options: Options) -> None:
    """Train both sides and print the comparison."""
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: too few; give at least 1")
    runs = compete(options)
    if options.json:
        ratio, quartiles = spread(
            [b.seconds / o.seconds for b, o in zip(runs["nanoGPT"], runs["ours"], strict=True)]
        )
        output = {name: [asdict(run) for run in own] for name, own in runs.items()}
        print(
            json.dumps(
                {"machine": machine(), "runs": output, "ratio": ratio, "quartiles": quartiles},
                indent=2,
            )
        )
    else:
        Console().print(table(runs))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
