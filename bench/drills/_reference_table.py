"""Command and table of the drills that compare models with their reference in torch."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import transformers


class Named(Protocol):
    """A case of a drill."""

    @property
    def name(self) -> str: ...


Case = TypeVar("Case", bound=Named)


def run_drill(
    cases: Sequence[Case],
    run_case: Callable[[Case], tuple[str, bool]],
    *,
    head: Sequence[str],
    write_fixtures: Callable[[str], None] | None = None,
) -> int:
    """Print the table of a drill as its flags say; return 1 if a case does not pass.

    Args:
      cases: All cases; `--only WORD` takes those with the word in their names.
      run_case: Returns the line of a case, and if it passed.
      head: Lines above the table.
      write_fixtures: Writes the fixtures of the tests of the cases with a word in their names, in
        place of the table (`--fixtures`).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path)
    if write_fixtures is not None:
        parser.add_argument("--fixtures", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if write_fixtures is not None and options.fixtures:
        write_fixtures(options.only)
        return 0
    lines, failures = list(head), 0
    print("\n".join(lines))
    for case in cases:
        if options.only in case.name:
            line, passed = run_case(case)
            failures += not passed
            lines.append(line if passed else f"{line}  FAILED")
            print(lines[-1], flush=True)
    lines.append(f"{failures} failed")
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return int(failures > 0)
