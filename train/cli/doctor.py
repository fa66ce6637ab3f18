"""`python -m train doctor`."""

from __future__ import annotations

import json

from train.cli.parsing import wants_json
from train.doctor import doctor
from train.errors import UsageError


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 if something is wrong."""
    json_wanted = wants_json(arguments)
    if arguments:
        raise UsageError(f"doctor {arguments[0]}: takes no arguments but --json; leave it out")
    report = doctor()
    if json_wanted:
        print(json.dumps(report.as_dict()))
    else:
        report.print()
    return 0 if report.ok else 1
