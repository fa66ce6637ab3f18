"""`python -m train describe CONFIG [--ask-compiler] [--a.b.c VALUE ...]`."""

from __future__ import annotations

import json

from train.cli.kinds import explained, with_kinds
from train.cli.parsing import parse, positional, settings_errors, wants, wants_json
from train.experiment import Experiment
from train.registry import find

ASK = "--ask-compiler also compiles the step, and shows the memory that the compiler reserves."


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = wants_json(arguments)
    compiled = wants(arguments, "--ask-compiler")
    name = positional(arguments, "CONFIG", "describe")
    with settings_errors():
        default, left = with_kinds(find(name), arguments)
        verb, more = f"describe {name}", f"{ASK}\n\n{explained(default)}"
        experiment = parse(Experiment, left, verb=verb, default=default, more=more)
    from train.describe import describe
    from train.hardware import keep_compiled_programs, local_hardware
    from transformer.precision import AUTOMATIC

    if compiled or experiment.model.precision == AUTOMATIC:
        from train.choices import with_precision

        keep_compiled_programs()
        hardware = local_hardware()
        experiment = with_precision(experiment, hardware)
        description = describe(experiment, hardware, compiled=compiled)
    else:
        description = describe(experiment)
    if json_wanted:
        print(json.dumps(description.as_dict()))
    else:
        description.print()
    return 0
