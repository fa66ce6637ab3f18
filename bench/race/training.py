"""Training against nanoGPT and Hugging Face: a step, and a whole run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.machine import cores, gpu_name
from bench.race.harness import (
    OURS,
    ROOT,
    Contender,
    peer,
    print_machine,
    print_race,
    race,
    ratios,
    take_turns,
)
from train.estimate.chips import CHIPS

# A training step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Shape of a GPT-2, and batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int


SHAPES = {
    "small": Shape(layers=6, width=384, heads=6, context=256, batch=12, vocabulary=65),
    "gpt2": Shape(layers=12, width=768, heads=12, context=512, batch=2, vocabulary=50_304),
    "gpt2-1k": Shape(layers=12, width=768, heads=12, context=1024, batch=32, vocabulary=50_304),
    "medium-1k": Shape(layers=24, width=1024, heads=16, context=1024, batch=16, vocabulary=50_304),
}
"""Five steps of `small` and `gpt2` take about two seconds on two cores; the others fill a GPU."""

OPTIMIZER = {"learning_rate": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}


@dataclass(frozen=True)
class StepOptions:
    """Compare a full training step with a peer's.

    A step is forward, backward, clipping by global norm and AdamW, over random tokens that change
    at every step, on the GPU if there is one, else on all cores.
    """

    against: Literal["nanogpt", "hf", "products"]
    """The peer: nanoGPT from a checkout, Hugging Face's GPT2LMHeadModel, or the products with
    weights of our own step, without the rest of it: its floor."""
    nanogpt: Path | None = None
    """A checkout of nanoGPT."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch, and transformers for `hf`."""
    shapes: tuple[Literal["small", "gpt2", "gpt2-1k", "medium-1k"], ...] = ("small", "gpt2")
    """small: 6 layers x 384, T 256, B 12, V 65; gpt2: 12 layers x 768, T 512, B 2, V 50,304;
    gpt2-1k: the same with T 1,024, B 32; medium-1k: 24 layers x 1,024, T 1,024, B 16."""
    batch: int = 0
    """Sequences in a batch; 0: those of the shape."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of matrix products on both sides; weights are float32."""
    rounds: int = 15
    """Number of turns per side."""
    steps: int = 5
    """Steps in a turn."""
    warmup: int = 3
    """Steps before the first turn."""
    compile: bool = False
    """Run the peer under torch.compile."""


def step(options: StepOptions) -> None:
    """Race a training step in each of the requested shapes."""
    print_machine()
    for name in options.shapes:
        shape = replace(SHAPES[name], batch=options.batch or SHAPES[name].batch)
        settings: dict[str, Any] = {
            **asdict(shape),
            **OPTIMIZER,
            "activation": "gelu_tanh" if options.against == "hf" else "gelu",  # the peer's
            "precision": options.precision,
            "compile": options.compile,
            "checkout": str(options.nanogpt and options.nanogpt.absolute()),
            "threads": cores(),
        }
        if options.against == "products":
            command: tuple[str, ...] = (*OURS, "products")
        else:
            command = peer(options.torch_python, options.against)
        tokens = options.steps * shape.batch * shape.context
        records = print_race(
            f"training step, {shape.layers} x {shape.width}, {shape.heads} heads, "
            f"T {shape.context}, B {shape.batch}, V {shape.vocabulary:,}, {options.precision}",
            [
                Contender("ours", (*OURS, "step"), settings),
                Contender(options.against, command, settings),
            ],
            work=tokens,
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.warmup,
        )
        for chip in CHIPS.values():
            if chip.device_kind == gpu_name():
                scores = 6 * shape.layers * shape.width * shape.context  # the causal half
                flops = 6 * int(records[0].facts["parameters"]) + scores  # of a token
                rate = flops * records[0].rate(tokens)
                print(f"MFU of ours: {rate / chip.peak_flops_per_second(options.precision):.1%}")


# A whole run --------------------------------------------------------------------------------------

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
"""What its README gives for a laptop."""


@dataclass(frozen=True)
class RunOptions:
    """Train the character model of Shakespeare here and in nanoGPT, in turns.

    Ours is `python -m train fit shakespeare_char_cpu`, nanoGPT's is the command that its README
    gives for a laptop.
    """

    data: Path
    """tiny Shakespeare, as one text file."""
    nanogpt: Path
    """A checkout of nanoGPT; it is copied, not touched."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and what nanoGPT needs."""
    rounds: int = 3
    """Number of runs per side."""


class Run(NamedTuple):
    """Wall time of one training, and nats per character over the whole validation text."""

    seconds: float
    loss: float


def shakespeare(options: RunOptions) -> None:
    """Race whole runs: imports, compilation, evaluation and checkpoints included."""
    print_machine()
    with tempfile.TemporaryDirectory() as scratch:
        checkout = _prepared_nanogpt(options, Path(scratch))

        def ours() -> Run:
            folder = tempfile.mkdtemp(dir=scratch)
            seconds, _ = _timed(_fit(options, folder), ROOT)
            evaluate = (sys.executable, "-m", "train", "evaluate", folder, "--json")
            return Run(seconds, json.loads(_timed(evaluate, ROOT)[1])["loss"])

        def nanogpt() -> Run:
            folder, python = tempfile.mkdtemp(dir=scratch), str(options.torch_python.absolute())
            seconds, _ = _timed((python, *NANOGPT_TRAIN, f"--out_dir={folder}"), checkout)
            # Of the best checkpoint, which is the one that it keeps.
            settings = {
                "checkout": str(checkout),
                "checkpoint": f"{folder}/ckpt.pt",
                "tokens": str(checkout / "data/shakespeare_char/val.bin"),
            }
            evaluate = Contender("loss", peer(options.torch_python, "nanogpt_loss"), settings)
            [record] = race([evaluate], rounds=1, steps=1, warmup=0)
            return Run(seconds, record.losses[0] or 0.0)

        runs = take_turns({"ours": ours, "nanoGPT": nanogpt}, options.rounds)
    columns = ("", "wall time", "speed of nanoGPT", "quartiles", "validation loss")
    table = Table(*columns, title=f"Shakespeare by characters, {options.rounds} rounds")
    for name, own in runs.items():
        seconds = [run.seconds for run in own]
        table.add_row(
            name,
            f"{median(seconds):.1f} s",
            *ratios([run.seconds for run in runs["nanoGPT"]], seconds),
            f"{median(run.loss for run in own):.4f}",
        )
    Console().print(table)


def _fit(options: RunOptions, folder: str) -> tuple[str, ...]:
    fit = ("fit", "shakespeare_char_cpu", "--workdir", folder)
    return (sys.executable, "-m", "train", *fit, "--data.path", str(options.data.absolute()))


def _prepared_nanogpt(options: RunOptions, folder: Path) -> Path:
    """Return a copy of nanoGPT with our text prepared in its own way."""
    data, checkout = "data/shakespeare_char", folder / "nanoGPT"
    ignored = shutil.ignore_patterns(".git", "out-*", "*.bin", "*.pkl")
    shutil.copytree(options.nanogpt, checkout, ignore=ignored)
    shutil.copyfile(options.data, checkout / data / "input.txt")
    # It imports requests to download the text, which is there already.
    prepare = (
        "import runpy, sys, types; sys.modules['requests'] = types.ModuleType('requests'); "
        f"runpy.run_path('{data}/prepare.py')"
    )
    _timed((str(options.torch_python.absolute()), "-c", prepare), checkout)
    return checkout


def _timed(command: Sequence[str], folder: Path) -> tuple[float, str]:
    """Run a command in a folder; return its wall time in seconds and its standard output."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started, done.stdout


# The start ----------------------------------------------------------------------------------------


def start(options: RunOptions) -> None:
    """Race from the start of Python to the end of the first step, without and with our caches.

    The same models on the same text as `shakespeare`; nanoGPT's text is prepared before, and it
    evaluates one batch of each split before its first step.
    """
    print_machine()
    with tempfile.TemporaryDirectory() as scratch:
        checkout = _prepared_nanogpt(options, Path(scratch))

        def ours(cache: str = "") -> float:
            folder = tempfile.mkdtemp(dir=scratch)
            command = (*_fit(options, folder), "--log-every", "1", "--evaluation.every", "0")
            cache = cache or tempfile.mkdtemp(dir=scratch)
            return _seconds_until(_first_metrics(folder), command, ROOT, {"XDG_CACHE_HOME": cache})

        def nanogpt() -> float:
            log = Path(tempfile.mkdtemp(dir=scratch)) / "log"
            python = str(options.torch_python.absolute())
            command = (python, "-u", *NANOGPT_TRAIN, "--eval_iters=1", f"--out_dir={log.parent}")
            seen = lambda: "iter 0:" in log.read_text()  # noqa: E731
            return _seconds_until(seen, command, checkout, {}, log)

        caches = tempfile.mkdtemp(dir=scratch)
        ours(caches)  # fills them
        sides = {"ours": ours, "ours, cached": lambda: ours(caches), "nanoGPT": nanogpt}
        seconds = take_turns(sides, options.rounds)
    table = Table("", "seconds", "speed of nanoGPT", title="from the start to the first step")
    for name, own in seconds.items():
        ratio = median(b / o for b, o in zip(seconds["nanoGPT"], own, strict=True))
        table.add_row(name, f"{median(own):.1f}", f"{ratio:.2f}")
    Console().print(table)


def _first_metrics(folder: str) -> Callable[[], bool]:
    metrics = Path(folder) / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.stat().st_size > 0


def _seconds_until(
    seen: Callable[[], bool],
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    log: Path | None = None,
) -> float:
    """Run a command until something is seen, then end it; return the seconds."""
    with (log or Path(os.devnull)).open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not seen():
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)}: ended before its first step")
                time.sleep(0.01)
            return time.perf_counter() - started
        finally:
            process.kill()
            process.wait()
