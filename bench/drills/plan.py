"""Compare the memory estimate of `plan` with what compilers reserve.

    python -m bench.drills.plan [--platform tpu | gpu] [--write]

Compile the real step of each case for its target and print both figures, with the fraction of
cases within a tenth. Needs libtpu (`pip install '.[tpu]'`) or the CUDA plugin
(`pip install '.[cuda13]'`), and takes a minute or two per case. Cases without an installed compiler
are reported and skipped. `--write` stores the figures in tests/train/estimate/footprint_cases.json,
which the tests check the estimates against; `--fit` prints the best coefficients.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from train.cli.parsing import parse, select_kinds
from train.config.experiment_files import find_experiment
from train.errors import UserError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.candidate import Candidate
from train.estimate.compile import compile_step
from train.estimate.description_tables import format_bytes
from train.estimate.footprint import Coefficients, apply_coefficients, footprint_terms
from train.estimate.quantities import Quantities
from train.estimate.target import parse_target
from train.experiment import Experiment

FILE = Path("tests/train/estimate/footprint_cases.json")

CASES = Path(__file__).with_suffix(".txt")
"""A config, a target and settings on each line."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Cases to compile."""

    platform: Literal["all", "tpu", "gpu"] = "all"
    write: bool = False
    """Keep the numbers for the tests."""
    missing: bool = False
    """Only the cases whose numbers are not kept."""
    fit: bool = False
    """Compile nothing, and fit the coefficients to the numbers that are kept."""


def cases(options: Options) -> Iterator[str]:
    """Return the lines of the file."""
    for line in CASES.read_text().splitlines():
        if line and not line.startswith("#"):
            platform = parse_target(line.split()[1]).chip.platform
            if options.platform in ("all", platform):
                yield line


def compiled(case: str) -> dict[str, Any]:
    """Return the compiler's figures of a case, and the terms of the estimate."""
    config, name, *settings = case.split()
    default, left = select_kinds(find_experiment(config), settings)
    experiment = parse(Experiment, left, verb="plan", default=default)
    experiment, _ = resolve_sizes(experiment)
    target = parse_target(name)
    quantities = Quantities.from_experiment(experiment, target)
    candidate = Candidate.from_experiment(experiment, target.num_chips)
    step = compile_step(experiment, target)
    return {
        "case": case,
        "platform": target.chip.platform,
        "parts": footprint_terms(quantities, candidate),
        "arguments": step.arguments,
        "temporaries": step.temporaries,
        "peak": step.peak,
        "refused": bool(step.rejection),
        "seconds": round(step.compile_seconds),
    }


def ratio(case: dict[str, Any]) -> float:
    """Return the estimate of all memory divided by the compiler's."""
    size = sum(apply_coefficients(case["terms"]).values())
    return float(case["arguments"] + size) / float(case["peak"])


def main(options: Options) -> None:
    """Print a table."""
    stored_cases = (
        {each["case"]: each for each in json.loads(FILE.read_text())} if FILE.exists() else {}
    )
    if options.fit:
        fit(list(stored_cases.values()))
        return
    table = Table("case", "estimated", "compiled", "ratio", "seconds", box=None)
    ratios = []
    for case in cases(options):
        if options.missing and case in stored_cases:
            continue
        try:
            result = compiled(case)
        except UserError as error:
            Console().print(f"{case}: {error}")
            continue
        ratios.append(ratio(result))
        shown = format_bytes(ratios[-1] * result["peak"]), format_bytes(result["peak"])
        table.add_row(case, *shown, f"{ratios[-1]:.2f}", str(result["seconds"]))
        if options.write:
            stored_cases[case] = result
            FILE.write_text(json.dumps(list(stored_cases.values()), indent=1) + "\n")
    Console(width=160).print(table)
    within = sum(abs(each - 1) <= 0.1 for each in ratios)
    Console().print(f"{within} of {len(ratios)} within a tenth")


def fit(all_cases: list[dict[str, Any]]) -> None:
    """Print coefficients fitted to all cases, with errors relative to all memory."""
    names = Coefficients._fields
    own = [each for each in all_cases if not each["refused"]]
    peak = np.array([each["peak"] for each in own])
    matrix = np.array([[each["terms"].get(name, 0) for name in names] for each in own])
    targets = np.array([each["peak"] - each["arguments"] for each in own])
    coefficients, _ = nnls(matrix / peak[:, None], targets / peak)
    Console().print(dict(zip(names, coefficients.round(2).tolist(), strict=True)))
    error = abs(matrix @ coefficients - targets) / peak
    for platform in sorted({each["platform"] for each in own}):
        errors = [e for e, each in zip(error, own, strict=True) if each["platform"] == platform]
        within = sum(e <= 0.1 for e in errors)
        Console().print(f"{platform}: {within} of {len(errors)} within a tenth")


if __name__ == "__main__":
    main(tyro.cli(Options))
