"""Decoding speed compared with Hugging Face, in turns on this machine.

    python bench/decode.py --torch-python ~/torch/bin/python

Both sides continue random prompts by 128 tokens, greedily, with a key-value cache, on the GPU if
there is one, else on all cores; the time includes the prefill. The model is GPT-2's smallest with
random weights. PyTorch and transformers are imported by ``--torch-python``, which may belong to
another environment.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.contender import Contender, interpreter
from bench.machine import cores, gpu_name, machine
from bench.side_by_side import Row, compare, race, table
from train.errors import UserError
from train.estimate.chips import CHIPS

PEER = "Hugging Face"
STACKED = "ours, from stacks"

COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
"""XLA records the kernels of a loop's body as one graph, and starts it once for each token."""


@dataclass(frozen=True)
class Options:
    """Compare decoding with Hugging Face's generate."""

    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and transformers."""
    batch: tuple[int, ...] = (1, 8)
    """Batch sizes, each measured separately."""
    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    """Context length of the model."""
    vocabulary: int = 50_257
    prompt: int = 16
    """Tokens of each prompt."""
    new_tokens: int = 128
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and products on both sides."""
    compile: bool = False
    """Compile the peer's step, with a cache of fixed size."""
    variants: bool = False
    """Race ours against itself in place of the peer: from stacked weights, and with XLA's command
    buffers for the loop over tokens (GPUs)."""
    rounds: int = 7
    """Number of turns per side; a turn continues one batch."""
    warmup: int = 1
    """Batches before the first turn."""
    seed: int = 0
    """Seed of the order of turns."""
    json: bool = False
    """Print one JSON object in place of tables."""


@dataclass(frozen=True)
class Measurement:
    """Rows of one batch size; rates are new tokens per second, ratios are to the peer's."""

    batch: int
    reference: str
    rows: list[Row]


def contenders(options: Options, batch: int) -> list[Contender]:
    """Return both sides with the same settings. Raises UserError without the peer's interpreter."""
    shared = ("layers", "width", "heads", "context", "vocabulary", "prompt", "new_tokens")
    settings = {name: getattr(options, name) for name in (*shared, "precision", "compile")}
    settings |= {"batch": batch, "threads": cores()}
    ours = (sys.executable, "-m", "bench.peers.ours_decoding")
    if options.variants:
        return [
            Contender("ours", ours, settings),
            Contender("command buffers", ("env", f"XLA_FLAGS={COMMAND_BUFFERS}", *ours), settings),
            Contender(STACKED, ours, {**settings, "stacked": True}),
        ]
    torch_python = interpreter(options.torch_python)
    return [
        Contender("ours", ours, settings),
        Contender(PEER, (torch_python, "-m", "bench.peers.huggingface_decoding"), settings),
    ]


def measure(options: Options, batch: int) -> Measurement:
    """Race both sides with one batch size."""
    records = race(
        contenders(options, batch),
        rounds=options.rounds,
        steps=1,
        warmup=options.warmup,
        seed=options.seed,
        build_together=bool(gpu_name()),
    )
    reference = STACKED if options.variants else PEER
    rows = compare(records, reference, batch * options.new_tokens)
    return Measurement(batch, reference, rows)


def main(options: Options) -> None:
    """Measure the requested batch sizes; print each at once, or one object at the end."""
    measurements = []
    console = Console()
    if not options.json:
        console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for batch in options.batch:
        measurement = measure(options, batch)
        measurements.append(measurement)
        if not options.json:
            title, reference = _title(options, batch), measurement.reference
            console.print(table(title, measurement.rows, reference, "tokens"))
            if gpu_name():
                console.print(_bandwidth(options, measurement))
    if options.json:
        output = {"machine": machine(), "measurements": [asdict(m) for m in measurements]}
        print(json.dumps(output, indent=2))


def _bandwidth(options: Options, measurement: Measurement) -> str:
    """Return the share of the memory's bandwidth that reading each weight once a token takes."""
    kinds = [chip for chip in CHIPS.values() if chip.device_kind == gpu_name()]
    if not kinds:
        return f"the bandwidth of {gpu_name()} is not known"
    width = 4 if options.precision == "float32" else 2
    shares = []
    for row in measurement.rows:
        num_bytes = width * int(row.record.facts["parameters"])
        share = row.rate / measurement.batch * num_bytes / kinds[0].memory_bandwidth
        shares.append(f"{row.record.name} {share:.0%}")
    return "of the bandwidth, every weight once a token: " + ", ".join(shares)


def _title(options: Options, batch: int) -> str:
    return (
        f"decoding {options.new_tokens} tokens, {options.layers} x {options.width}, "
        f"V {options.vocabulary:,}, B {batch}, {options.precision}, {options.rounds} rounds"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
