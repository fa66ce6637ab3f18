"""Longformer and BigBird beside Hugging Face's modules: for `python -m bench.longformer`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.contender import Contender, Record, interpreter
from bench.machine import cores
from bench.side_by_side import compare, race, table

PEER = "Hugging Face"


@dataclass(frozen=True)
class Shape:
    """Settings of both sides."""

    width: int = 768
    heads: int = 12
    window: int = 256
    """Longformer: keys on each side."""
    block: int = 64
    """BigBird: block size."""


def contenders(torch_python: Path, mixer: str, length: int, shape: Shape) -> list[Contender]:
    """Return both sides with the same settings. Raises UserError without the peer's interpreter."""
    settings: dict[str, Any] = dict(mixer=mixer, length=length, threads=cores(), **vars(shape))
    peer = (interpreter(torch_python), "-m", "bench.peers.huggingface_long")
    return [
        Contender("ours", (sys.executable, "-m", "bench.peers.ours_mixer"), settings),
        Contender(PEER, peer, settings),
    ]


def race_both(
    torch_python: Path, length: int, lengths: Sequence[int], rounds: int, console: Console
) -> None:
    """Print Longformer's times at one length, and BigBird's memory at several."""
    shape = Shape()
    sides = contenders(torch_python, "longformer", length, shape)
    rows = compare(race(sides, rounds=rounds, steps=1, warmup=1), PEER, length)
    title = (
        f"longformer, T {length:,}, D {shape.width}, {shape.heads} heads, window {shape.window} on "
        f"each side, float32, forward, {rounds} rounds"
    )
    console.print(table(title, rows, PEER, "tokens"))
    memory: dict[int, list[Record]] = {}
    for each in lengths:
        sides = contenders(torch_python, "bigbird", each, shape)
        memory[each] = race(sides, rounds=1, steps=1, warmup=1)
    console.print(growth(memory))


def growth(memory: dict[int, list[Record]]) -> Table:
    """Return the memory growth of a process by length, and its exponent."""
    grid = Table(title="bigbird: MiB that a forward pass takes beside weights and input")
    for title in ("", *(f"{length:,}" for length in memory), "~ T^"):
        grid.add_column(title, justify="right" if title else "left")
    for side in range(2):
        records = [pair[side] for pair in memory.values()]
        taken = [record.peak_memory_bytes for record in records]
        cells = [f"{each / 2**20:,.0f}" for each in taken]
        grid.add_row(records[0].name, *cells, exponent(list(memory), taken))
    return grid


def exponent(lengths: Sequence[int], taken: Sequence[int]) -> str:
    """Return p of memory ~ T^p between the two longest lengths."""
    if len(lengths) < 2 or min(taken[-2:]) <= 0:
        return "-"
    return f"{np.log(taken[-1] / taken[-2]) / np.log(lengths[-1] / lengths[-2]):.2f}"
