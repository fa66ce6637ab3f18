"""Verbs that look at many runs: `scaling`.

What computes is imported inside the verbs, so that `--help` loads no JAX.
"""

import dataclasses
import json

from train.cli.parsing import as_usage_errors, parse, pop_json_flag
from train.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Settings of the fits."""

    budget: str = ""
    """Training FLOPs to find the compute-optimal model for; several are separated by commas."""
    bootstrap_samples: int = 200
    """Resamples of the runs behind the 95% intervals."""
    workdir: str = ""
    """Folder of the figure and of the fits as JSON (and of the runs, where they are trained)."""

    def __post_init__(self) -> None:
        if self.bootstrap_samples < 2:
            raise UsageError(f"bootstrap_samples {self.bootstrap_samples}: give 2 or more")

    def budgets(self) -> list[float]:
        """Return the budgets as numbers."""
        from train.scaling.numbers import parse_counts

        return parse_counts(self.budget, "--budget") if self.budget else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvArguments(FitOptions):
    """Fit scaling laws to the runs in a CSV file with the columns parameters, tokens and loss."""

    from_csv: str
    """The file: parameters without embeddings, training tokens, held-out loss in nats a token."""


def run_scaling(arguments: list[str]) -> int:
    """Fit scaling laws to new runs or to a CSV; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    if not any(each.partition("=")[0] == "--from-csv" for each in arguments):
        raise UsageError("scaling: --from-csv is missing")
    with as_usage_errors():
        given = parse(CsvArguments, arguments, verb="scaling")
    return _fit_csv(given, json_wanted)


def _fit_csv(given: CsvArguments, json_wanted: bool) -> int:
    """Fit the runs of a file, and print the fits."""
    from train.scaling.analysis import fit_csv
    from train.scaling.tables import print_analysis

    analysis = fit_csv(given.from_csv, given.budgets(), given.bootstrap_samples)
    found = analysis.as_dict()
    if given.workdir:
        from train.scaling.report import write_report

        write_report(analysis, given.workdir)
    if json_wanted:
        print(json.dumps(found))
    else:
        print_analysis(analysis)
    return 0
