"""Compare the memory estimate of `plan` with what compilers reserve.

    python -m bench plan [--write] [--fit]

Compile the real step of each case for its target and print both figures, with the fraction of
cases within a tenth. Needs libtpu (`pip install '.[tpu]'`) or the CUDA plugin
(`pip install '.[cuda13]'`), and takes a minute or two per case. Cases without an installed compiler
are reported and skipped. `--write` stores the figures in tests/train/estimate/memory_cases.json,
which the tests check the estimates against; `--fit` prints the best coefficients.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog

from train.cli.config_verbs import ConfigArguments
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment
from train.config.resolve import resolve_precision
from train.errors import UserError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.compile import compile_step
from train.estimate.memory import Coefficients, Terms, count_terms
from train.estimate.quantities import Candidate, Quantities
from train.estimate.tables import format_bytes
from train.estimate.target import Target, parse_target
from train.experiment import Experiment

FILE = Path("tests/train/estimate/memory_cases.json")

CASES = Path(__file__).with_suffix(".txt")
"""A config, a target and settings on each line."""


def parse_case(case: str) -> tuple[Experiment, Target]:
    """Return the experiment and the target of a line."""
    config, name, *settings = case.split()
    base = find_experiment(config)
    given = parse(ConfigArguments, settings, verb="plan", experiment=base)
    target = parse_target(name)
    experiment, _ = resolve_sizes(given.experiment)
    return resolve_precision(experiment, target.hardware), target


def case_terms(case: str) -> Terms:
    """Return the terms of the estimate of a case."""
    experiment, target = parse_case(case)
    candidate = Candidate.from_experiment(experiment, target.num_devices)
    return count_terms(Quantities(experiment, target.hardware), candidate)


def compiled(case: str) -> dict[str, Any]:
    """Return the compiler's figures of a case, and the terms of the estimate."""
    experiment, target = parse_case(case)
    step = compile_step(experiment, target)
    return {
        "case": case,
        "platform": target.chip.platform,
        "terms": case_terms(case)._asdict(),
        "arguments": step.arguments,
        "temporaries": step.temporaries,
        "peak": step.peak,
        "refused": bool(step.rejection),
        "seconds": round(step.compile_seconds),
    }


def ratio(case: dict[str, Any]) -> float:
    """Return the estimate of all memory divided by the compiler's."""
    size = sum(Terms(**case["terms"]).estimated(case["platform"]))
    return float(case["arguments"] + size) / float(case["peak"])


def drill(write: bool = False, fit: bool = False) -> None:
    """Print a table.

    Args:
      write: Store the numbers for the tests.
      fit: Compile nothing, and fit the coefficients to the stored numbers.
    """
    stored_cases = {each["case"]: each for each in json.loads(FILE.read_text())}
    if fit:
        print_fitted(list(stored_cases.values()))
        return
    table = Table("case", "estimated", "compiled", "ratio", "seconds", box=None)
    ratios = []
    for case in CASES.read_text().splitlines():
        if case.startswith("#"):
            continue
        try:
            result = compiled(case)
        except UserError as error:
            print(f"{case}: {error}")
            continue
        ratios.append(ratio(result))
        shown = format_bytes(ratios[-1] * result["peak"]), format_bytes(result["peak"])
        table.add_row(case, *shown, f"{ratios[-1]:.2f}", str(result["seconds"]))
        if write:
            stored_cases[case] = result
            FILE.write_text(json.dumps(list(stored_cases.values()), indent=1) + "\n")
    Console(width=160).print(table)
    print(f"{sum(abs(each - 1) <= 0.1 for each in ratios)} of {len(ratios)} within a tenth")


def print_fitted(cases: list[dict[str, Any]]) -> None:
    """Print coefficients fitted to all cases of a platform, with errors relative to all memory.

    The least sum of what errors exceed 0.05: a mean square would trade many good estimates for a
    few bad ones. Then each case is estimated with coefficients fitted to all others.
    """
    for platform in sorted({each["platform"] for each in cases}):
        own = [each for each in cases if each["platform"] == platform and not each["refused"]]
        peak = np.array([each["peak"] for each in own])[:, None]
        names = Coefficients._fields
        matrix = np.array([[each["terms"][name] for name in names] for each in own]) / peak
        known = ("arguments", "gradients")  # what counts once
        sizes = [each["terms"] | {"arguments": each["arguments"]} for each in own]
        targets = 1 - np.array([sum(each[name] for name in known) for each in sizes]) / peak[:, 0]
        coefficients = fitted(matrix, targets)
        print(platform, dict(zip(names, coefficients.round(2).tolist(), strict=True)))
        errors = abs(matrix @ coefficients - targets)
        others = [fitted(np.delete(matrix, i, 0), np.delete(targets, i)) for i in range(len(own))]
        held_out = abs(np.sum(matrix * np.array(others), axis=1) - targets)
        for name, values in (("fitted", errors), ("each without itself", held_out)):
            within, worst = sum(values <= 0.1), max(values)
            print(f"{name}: {within} of {len(own)} within a tenth, worst {worst:.0%}")


def fitted(
    matrix: np.ndarray,  # [cases, terms]
    targets: np.ndarray,  # [cases]
) -> np.ndarray:  # [terms], not negative
    """Return the coefficients with the least sum of what absolute errors exceed 0.05."""
    cases, terms = matrix.shape
    excess, free = -np.eye(cases), 0.05
    solution = linprog(
        np.concatenate([np.zeros(terms), np.ones(cases)]),
        A_ub=np.block([[matrix, excess], [-matrix, excess]]),
        b_ub=np.concatenate([targets + free, free - targets]),
    )
    return np.asarray(solution.x[:terms])
