"""The verb `doctor`."""

from __future__ import annotations

import json

from train.cli.parsing import pop_json_flag
from train.doctor.report import run_checks
from train.errors import UsageError


def main(arguments: list[str]) -> int:
    """Print a report of this machine; return 1 if it has a problem."""
    json_wanted = pop_json_flag(arguments)
    if arguments:
        raise UsageError(f"doctor {arguments[0]}: takes no arguments but --json; leave it out")
    report = run_checks()
    if json_wanted:
        print(json.dumps(report.as_dict()))
    else:
        report.print()
    return 0 if report.ok else 1
