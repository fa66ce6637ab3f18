"""`python -m train describe CONFIG [--a.b.c VALUE ...]`."""

from __future__ import annotations

import json

from train.cli.parsing import parse, positional, settings_errors, wants_json
from train.experiment import Experiment
from train.registry import find


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = wants_json(arguments)
    name = positional(arguments, "CONFIG", "describe")
    with settings_errors():
        default = find(name)
        experiment = parse(Experiment, arguments, verb=f"describe {name}", default=default)
    from train.describe import describe

    description = describe(experiment)
    if json_wanted:
        print(json.dumps(description.as_dict()))
    else:
        description.print()
    return 0
