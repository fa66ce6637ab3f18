"""Full training step compared with nanoGPT or Hugging Face, in turns on this machine.

    python bench/train_step.py --against nanogpt --nanogpt ~/nanoGPT --torch-python ~/bin/python
    python bench/train_step.py --against hf --torch-python ~/bin/python
    python bench/train_step.py --against products  # the floor: the step's own products alone

A step is forward, backward, clipping by global norm and AdamW, over random tokens that change at
every step, on the GPU if there is one, else on all cores, with the peer's GELU on both sides.
PyTorch (and transformers for ``hf``) are imported by ``--torch-python``, which may belong to
another environment.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.contender import Contender, interpreter
from bench.machine import cores, gpu_name, machine
from bench.side_by_side import Row, compare, race, table
from train.errors import UserError
from train.estimate.chips import CHIPS

Gelu = Literal["erf", "tanh"]
OURS = "ours"


@dataclass(frozen=True)
class Shape:
    """Shape of a model, and batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    family: Literal["gpt2", "llama"] = "gpt2"
    """llama: RoPE, RMSNorm, SwiGLU of 11/4 the width, no biases, an output matrix of its own."""


SHAPES = {
    "small": Shape(layers=6, width=384, heads=6, context=256, batch=12, vocabulary=65),
    "gpt2": Shape(layers=12, width=768, heads=12, context=512, batch=2, vocabulary=50_304),
    "gpt2-1k": Shape(layers=12, width=768, heads=12, context=1024, batch=32, vocabulary=50_304),
    "medium-1k": Shape(layers=24, width=1024, heads=16, context=1024, batch=16, vocabulary=50_304),
    "llama-1b": Shape(24, 2048, 16, context=2048, batch=8, vocabulary=32_000, family="llama"),
    "llama-tiny": Shape(2, 256, 2, context=64, batch=2, vocabulary=1_000, family="llama"),
}
"""Five steps of `small` and `gpt2` take about two seconds on two cores; the others fill a GPU."""

OPTIMIZER = {"learning_rate": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}

# Default GELU of each peer.
OWN_GELU: dict[str, Gelu] = {"nanogpt": "erf", "hf": "tanh", "products": "erf"}


@dataclass(frozen=True)
class Options:
    """Compare a full training step with a peer's."""

    against: Literal["nanogpt", "hf", "products"]
    """The peer: nanoGPT from a checkout, Hugging Face's GPT2LMHeadModel, or the products with
    weights of our own step, without the rest of it."""
    nanogpt: Path | None = None
    """A checkout of nanoGPT."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch."""
    shapes: tuple[
        Literal["small", "gpt2", "gpt2-1k", "medium-1k", "llama-1b", "llama-tiny"], ...
    ] = ("small", "gpt2")
    """small: 6 layers x 384, T 256, B 12, V 65; gpt2: 12 layers x 768, T 512, B 2, V 50,304;
    gpt2-1k: the same with T 1,024, B 32; medium-1k: 24 layers x 1,024, T 1,024, B 16; llama-1b:
    Llama's layout, 1.3 billion parameters, 24 layers x 2,048, T 2,048, B 8, against hf only;
    llama-tiny: the same layout, to try it on a CPU."""
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
    shape = replace(shape, batch=options.batch or shape.batch)
    gelu = OWN_GELU[options.against] if options.gelu == "own" else options.gelu
    settings = {**asdict(shape), **OPTIMIZER, "gelu": gelu, "threads": cores()}
    settings["precision"] = options.precision
    ours = Contender(OURS, (sys.executable, "-m", "bench.peers.ours"), settings)
    return [ours, _peer(options, settings)]


def _peer(options: Options, settings: dict[str, Any]) -> Contender:
    if options.against == "products":
        return Contender("products", (sys.executable, "-m", "bench.peers.products"), settings)
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
    records = race(
        sides,
        rounds=options.rounds,
        steps=options.steps,
        warmup=options.warmup,
        seed=options.seed,
        build_together=bool(gpu_name()),
    )
    settings = sides[-1].settings
    tokens = options.steps * settings["batch"] * settings["context"]
    reference = sides[-1].name
    return Measurement(shape, options.steps, reference, compare(records, reference, tokens))


def main(options: Options) -> None:
    """Measure the requested shapes; print each at once, or one object at the end."""
    sides = {name: contenders(options, SHAPES[name]) for name in options.shapes}
    console = Console(quiet=options.json)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    measurements = []
    for name in options.shapes:
        measurement = measure(options, name, sides[name])
        sizes = replace(SHAPES[name], batch=sides[name][-1].settings["batch"])
        shape = f"{_describe(sizes)}, {options.precision}"
        title = f"training step, {shape}, {options.rounds} rounds"
        console.print(table(title, measurement.rows, measurement.reference, "tokens"))
        if gpu_name():
            console.print(_utilization(sizes, options.precision, measurement.rows))
        measurements.append(measurement)
    if options.json:
        output = {"machine": machine(), "measurements": [asdict(m) for m in measurements]}
        print(json.dumps(output, indent=2))


def _utilization(shape: Shape, precision: Literal["float32", "bfloat16"], rows: list[Row]) -> str:
    """Return each side's share of the chip's peak, with the scores in full and the causal half."""
    kinds = [chip for chip in CHIPS.values() if chip.device_kind == gpu_name()]
    if not kinds:
        return f"the peak of {gpu_name()} is not known"
    peak = kinds[0].peak_flops_per_second(precision)
    scores = 12 * shape.layers * shape.width * shape.context
    shown = []
    for row in rows:
        weights = 6 * int(row.record.facts["parameters"])
        full, half = (row.rate * (weights + part) / peak for part in (scores, scores / 2))
        shown.append(f"{row.record.name} {full:.1%} ({half:.1%} with half of the scores)")
    return "of the peak: " + ", ".join(shown)


def _describe(shape: Shape) -> str:
    return (
        f"{shape.layers} x {shape.width}, {shape.heads} heads, T {shape.context}, "
        f"B {shape.batch}, V {shape.vocabulary:,}"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
