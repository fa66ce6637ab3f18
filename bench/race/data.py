"""Preparation of a text, against Hugging Face's tokenizers."""

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.race.harness import OURS, Contender, peer, print_machine, print_race


@dataclass(frozen=True)
class DataOptions:
    """Train a byte-level BPE on a text and write its tokens: ours beside `tokenizers` alone.

    Ours is what `fit` does before it trains: it reads the file in pieces, holds out text, trains
    the tokenizer, and writes the tokens with their checksums. The peer reads all lines, trains
    `ByteLevelBPETokenizer`, encodes them as one batch and writes uint16.
    """

    data: Path
    """A text file in UTF-8."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and tokenizers."""
    vocabulary: int = 8192
    rounds: int = 5
    """Number of turns per side; a turn prepares the text once."""


def data(options: DataOptions) -> None:
    """Race the preparation of a text."""
    print_machine()
    settings = {"path": str(options.data.resolve()), "vocabulary": options.vocabulary}
    print_race(
        f"preparing a text, V {options.vocabulary:,}",
        [
            Contender("ours", (*OURS, "data"), settings),
            Contender("tokenizers", peer(options.torch_python, "data"), settings),
        ],
        work=options.data.stat().st_size / 1000,
        rounds=options.rounds,
        unit="kB",
    )
