"""What the comparisons with other libraries share: command, table, fixtures and a tokenizer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

Case = TypeVar("Case")

TESTS = Path(__file__).parents[2] / "tests"


@dataclasses.dataclass(frozen=True)
class Options:
    """Command line of a comparison."""

    only: str = ""
    """Take the cases with this word in their names."""
    fixtures: bool = False
    """Write the files of the tests again in place of the table."""


def versions(*packages: str) -> str:
    """Return packages with their versions: `torch 2.14.1, jax 0.10.2`."""
    return ", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages)


def compare_cases(
    options: Options,
    cases: Mapping[str, Case],
    compare: Callable[[str, Case], tuple[str, bool]],
    *,
    head: Sequence[str],
    write_fixtures: Callable[[dict[str, Case]], None] | None = None,
) -> int:
    """Print the table of a drill, one line a case; return 1 if a case does not pass.

    Args:
      options: Of the command line.
      cases: All cases by name.
      compare: Returns the line of a case, and if it passed.
      head: Lines above the table.
      write_fixtures: Writes the fixtures of the tests for some cases.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = {name: case for name, case in cases.items() if options.only in name}
    if options.fixtures and write_fixtures is not None:
        write_fixtures(chosen)
        return 0
    print("\n".join(head))
    failures = 0
    for name, case in chosen.items():
        line, passed = compare(name, case)
        failures += not passed
        print(line if passed else f"{line}  FAILED", flush=True)
    print(f"{failures} failed")
    return int(failures > 0)


def fixture_folders(root: Path, cases: Mapping[str, Case]) -> list[tuple[Path, Case]]:
    """Return the folders of fixtures with their cases; for another one, make its folder first."""
    return [(path, cases[path.name]) for path in sorted(root.iterdir()) if path.name in cases]


def train_byte_level(
    texts: Iterable[str], size: int, special: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer of some texts, its special tokens first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
