"""The verb `describe CONFIG [--ask-compiler] [--a.b.c VALUE ...]`."""

from __future__ import annotations

import json

from train.cli.parsing import (
    as_usage_errors,
    kinds_help,
    parse,
    pop_flag,
    pop_json_flag,
    pop_positional,
    select_kinds,
)
from train.config.registry import find_experiment
from train.experiment import Experiment

ASK_COMPILER_HELP = (
    "--ask-compiler also compiles the step and shows the memory that the compiler reserves."
)
"""Help text of `--ask-compiler`."""


def main(arguments: list[str]) -> int:
    """Print a description of an experiment; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    with_compiler = pop_flag(arguments, "--ask-compiler")
    name = pop_positional(arguments, "CONFIG", "describe")
    with as_usage_errors():
        default, left = select_kinds(find_experiment(name), arguments)
        verb, more = f"describe {name}", f"{ASK_COMPILER_HELP}\n\n{kinds_help(default)}"
        experiment = parse(Experiment, left, verb=verb, default=default, extra_help=more)
    from train.estimate.description import describe
    from train.runtime.hardware import enable_compilation_cache, local_hardware
    from transformer.precision import AUTO_POLICY

    if with_compiler or experiment.model.precision == AUTO_POLICY:
        from train.config.resolve import resolve_precision

        enable_compilation_cache()
        hardware = local_hardware()
        experiment = resolve_precision(experiment, hardware)
        description = describe(experiment, hardware, with_compiler=with_compiler)
    else:
        description = describe(experiment)
    if json_wanted:
        print(json.dumps(description.as_dict()))
    else:
        description.print()
    return 0
