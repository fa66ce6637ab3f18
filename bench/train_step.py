"""Full float32 training step compared with nanoGPT or Hugging Face, in turns on this machine.

    python bench/train_step.py --against nanogpt --nanogpt ~/nanoGPT --torch-python ~/bin/python
    python bench/train_step.py --against hf --torch-python ~/bin/python

A step is forward, backward, clipping by global norm and AdamW, over random tokens that change at
every step, on all cores, with the peer's GELU on both sides. PyTorch (and transformers for ``hf``)
are imported by ``--torch-python``, which may belong to another environment.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.contender import Contender, interpreter
from bench.machine import cores, machine
from bench.side_by_side import Row, compare, race, table
from train.errors import UserError

Gelu = Literal["erf", "tanh"]
OURS = "ours"


@dataclass(frozen=True)
class Shape:
    """GPT-2 shape and batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int


SHAPES = {
    "small": Shape(layers=6, width=384, heads=6, context=256, batch=12, vocabulary=65),
    "gpt2": Shape(layers=12, width=768, heads=12, context=512, batch=2, vocabulary=50_304),
}
# Steps a turn, so that a turn takes about two seconds on two cores.
STEPS = {"small": 5, "gpt2": 5}

OPTIMIZER = {"learning_rate": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}

# Default GELU of each peer.
OWN_GELU: dict[str, Gelu] = {"nanogpt": "erf", "hf": "tanh"}


@dataclass(frozen=True)
class Options:
    """Compare a full training step with a peer's."""

    against: Literal["nanogpt", "hf"]
    """The peer: nanoGPT from a checkout, or Hugging Face's GPT2LMHeadModel."""
    nanogpt: Path | None = None
    """A checkout of nanoGPT."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch."""
    shape: Literal["small", "gpt2", "both"] = "both"
    """small: 6 layers x 384, T 256, B 12, V 65; gpt2: 12 layers x 768, T 512, B 2, V 50,304."""
    rounds: int = 15
    """Number of turns per side."""
    steps: int | None = None
    """Steps in a turn; by default 5."""
    warmup: int = 3
    """Steps before the first turn."""
    gelu: Literal["own", "erf", "tanh"] = "own"
    """GELU of both sides; own: the peer's default (nanogpt erf, hf tanh)."""
    compile: bool = False
    """Run the peer under torch.compile."""
    seed: int = 0
    """Seed of the order of turns."""
    json: bool = False
    """Print one JSON object in place of tables."""


def contenders(options: Options, shape: Shape) -> list[Contender]:
    """Return ours and the peer with the same settings."""
    gelu = OWN_GELU[options.against] if options.gelu == "own" else options.gelu
    settings = {**asdict(shape), **OPTIMIZER, "gelu": gelu, "threads": cores()}
    ours = Contender(OURS, (sys.executable, "-m", "bench.peers.ours"), settings)
    return [ours, _peer(options, settings)]


def _peer(options: Options, settings: dict[str, Any]) -> Contender:
    name, module = {
        "nanogpt": ("nanoGPT", "bench.peers.nanogpt"),
        "hf": ("Hugging Face", "bench.peers.huggingface"),
    }[options.against]
    settings = {**settings, "compile": options.compile}
    if options.against == "nanogpt":
        settings["checkout"] = str(_checkout(options.nanogpt))
    name += ", compiled" if options.compile else ""
    return Contender(name, (interpreter(options.torch_python), "-m", module), settings)


def _checkout(path: Path | None) -> Path:
    if path is None:
        raise UserError("--nanogpt: not given; give the path of a checkout of nanoGPT")
    if not (path / "model.py").is_file():
        raise UserError(f"--nanogpt {path}: has no model.py; give a checkout of nanoGPT")
    return path.resolve()


@dataclass(frozen=True)
class Measurement:
    """Rows of one shape; rates are tokens per second, ratios are to the peer's."""

    shape: str
    steps: int
    reference: str
    rows: list[Row]


def measure(options: Options, shape: str, sides: list[Contender]) -> Measurement:
    """Compare the sides in one shape; the last is the reference."""
    steps = STEPS[shape] if options.steps is None else options.steps
    records = race(
        sides, rounds=options.rounds, steps=steps, warmup=options.warmup, seed=options.seed
    )
    tokens = steps * SHAPES[shape].batch * SHAPES[shape].context
    reference = sides[-1].name
    return Measurement(shape, steps, reference, compare(records, reference, tokens))


def main(options: Options) -> None:
    """Measure the requested shapes; print each at once, or one object at the end."""
    names = list(SHAPES) if options.shape == "both" else [options.shape]
    sides = {name: contenders(options, SHAPES[name]) for name in names}
    console = Console(quiet=options.json)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    measurements = []
    for name in names:
        measurement = measure(options, name, sides[name])
        title = f"training step, {_describe(SHAPES[name])}, {options.rounds} rounds"
        console.print(table(title, measurement.rows, measurement.reference, "tokens"))
        measurements.append(measurement)
    if options.json:
        output = {"machine": machine(), "measurements": [asdict(m) for m in measurements]}
        print(json.dumps(output, indent=2))


def _describe(shape: Shape) -> str:
    return (
        f"{shape.layers} x {shape.width}, {shape.heads} heads, T {shape.context}, "
        f"B {shape.batch}, V {shape.vocabulary:,}, float32"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
