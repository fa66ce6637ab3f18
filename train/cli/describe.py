"""`python -m train describe CONFIG [--a.b.c VALUE ...]`."""

from __future__ import annotations

import json

from train.cli.kinds import explained, with_kinds
from train.cli.parsing import parse, positional, settings_errors, wants_json
from train.experiment import Experiment
from train.registry import find


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = wants_json(arguments)
    name = positional(arguments, "CONFIG", "describe")
    with settings_errors():
        default, left = with_kinds(find(name), arguments)
        verb, more = f"describe {name}", explained(default)
        experiment = parse(Experiment, left, verb=verb, default=default, more=more)
    from train.describe import describe

    description = describe(experiment)
    if json_wanted:
        print(json.dumps(description.as_dict()))
    else:
        description.print()
    return 0
