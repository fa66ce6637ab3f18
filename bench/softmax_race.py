"""Softmax attention compared with PyTorch's, forward and backward, in alternating processes.

    python -m bench.softmax_race --torch-python ~/torch/bin/python [--lengths 1024 4096 16384]

Causal, one sequence of T tokens, the same inputs on both sides: ours blockwise, with memory O(T),
and PyTorch's `scaled_dot_product_attention`. `--full` adds ours with all scores at once. Memory is
the growth of the process during the run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from bench.contender import Contender, interpreter
from bench.machine import cores, machine
from bench.side_by_side import compare, race, table
from train.errors import UserError

PEER = "PyTorch"


@dataclass(frozen=True)
class Options:
    """Race softmax attention, forward and backward, against PyTorch's."""

    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch."""
    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    """T."""
    num_heads: int = 4
    head_dim: int = 64
    full: bool = False
    """Also run our reference backend."""
    rounds: int = 5


def contenders(options: Options, length: int) -> list[Contender]:
    """Return both sides with the same settings. Raises UserError without the peer's interpreter."""
    settings: dict[str, Any] = dict(
        length=length, num_heads=options.num_heads, head_dim=options.head_dim, threads=cores()
    )
    peer = (interpreter(options.torch_python), "-m", "bench.peers.torch_attention")
    backends = {"ours, tiles": "blockwise"}
    if options.full:
        backends["ours, all scores"] = "reference"
    mine = (sys.executable, "-m", "bench.peers.ours_attention")
    return [
        *(
            Contender(name, mine, settings | {"backend": backend})
            for name, backend in backends.items()
        ),
        Contender(PEER, peer, settings),
    ]


def main(options: Options) -> None:
    """Print a table for each length."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for length in options.lengths:
        records = race(contenders(options, length), rounds=options.rounds, steps=1, warmup=1)
        rows = compare(records, PEER, length)
        title = f"T {length:,}, {options.num_heads} heads of {options.head_dim}, float32, causal"
        console.print(table(title, rows, PEER, "tokens"))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
