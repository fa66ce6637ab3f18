"""Softmax attention compared with PyTorch's, forward and backward, in alternating processes.

    python -m bench.softmax_race --torch-python ~/torch/bin/python [--lengths 1024 4096 16384]
    python -m bench.softmax_race --backends cudnn blockwise --precision bfloat16 --batch 16

Causal, the same inputs on both sides: ours by the named backends, and PyTorch's
`scaled_dot_product_attention`. On the GPU if there is one, else on all cores. Memory is the growth
of the process, or of the GPU's allocator, during the run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from bench.contender import Contender, interpreter
from bench.machine import cores, gpu_name, machine
from bench.side_by_side import compare, race, table
from train.errors import UserError

PEER = "PyTorch"


@dataclass(frozen=True)
class Options:
    """Race softmax attention, forward and backward, against PyTorch's."""

    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch."""
    backends: tuple[str, ...] = ("blockwise",)
    """Our backends: `AttentionConfig.backend`. One that does not support the mask is replaced by
    the reference."""
    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    """T."""
    batch: int = 1
    """Number of sequences of the first length; longer ones are fewer, for as many tokens."""
    num_heads: int = 4
    head_dim: int = 64
    window: int = 0
    """Each query sees this many keys, itself included. 0: all earlier ones."""
    segments: int = 0
    """Number of packed documents in a sequence, of equal lengths. 0: not packed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 5
    steps: int = 1
    """Steps in a turn."""


def contenders(options: Options, length: int) -> list[Contender]:
    """Return both sides with the same settings. Raises UserError without the peer's interpreter."""
    shared = ("num_heads", "head_dim", "window", "segments", "precision")
    settings: dict[str, Any] = {name: getattr(options, name) for name in shared}
    batch = max(1, options.batch * options.lengths[0] // length)
    settings |= dict(batch=batch, length=length, threads=cores())
    peer = (interpreter(options.torch_python), "-m", "bench.peers.torch_attention")
    mine = (sys.executable, "-m", "bench.peers.ours_attention")
    return [
        *(
            Contender(f"ours, {backend}", mine, settings | {"backend": backend})
            for backend in options.backends
        ),
        Contender(PEER, peer, settings),
    ]


def main(options: Options) -> None:
    """Print a table for each length."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for length in options.lengths:
        sides = contenders(options, length)
        records = race(
            sides,
            rounds=options.rounds,
            steps=options.steps,
            warmup=max(1, options.steps),
            build_together=bool(gpu_name()),
        )
        batch = sides[-1].settings["batch"]
        rows = compare(records, PEER, options.steps * batch * length)
        console.print(table(_title(options, batch, length), rows, PEER, "tokens"))


def _title(options: Options, batch: int, length: int) -> str:
    masks = ["causal"]
    masks += [f"window {options.window}"] if options.window else []
    masks += [f"{options.segments} documents"] if options.segments else []
    heads = f"{options.num_heads} heads of {options.head_dim}"
    return f"{batch} x {length:,} tokens, {heads}, {options.precision}, {', '.join(masks)}"


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
