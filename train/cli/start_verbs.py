"""Verbs to begin with: `init` and `data`.

What computes is imported inside the verbs, so that `--help` loads no JAX.
"""

import dataclasses
from typing import Annotated

import tyro

from train.cli.config_verbs import parse_config_verb
from train.cli.parsing import parse, pop_json_flag, pop_positional, print_json
from train.errors import UsageError
from train.experiment import Experiment
from train.runtime.startup import program_name


@dataclasses.dataclass(frozen=True)
class InitArguments:
    """Write a commented config of your own, a language model on text, to change and to train."""

    data: str = ""
    """File, folder or pattern of text; default: the text that ships with Python."""


def run_init(arguments: list[str]) -> int:
    """Write a config file; return the exit status."""
    from train.config.experiment_files import write_config

    json_wanted = pop_json_flag(arguments)
    file = pop_positional(arguments, "FILE", "init")
    options = parse(InitArguments, arguments, verb="init FILE")
    write_config(file, options.data)
    if json_wanted:
        print_json({"file": file})
    else:
        print(f"wrote {file}; read it, then {program_name()} fit {file}")
    return 0


@dataclasses.dataclass(frozen=True)
class DataArguments:
    """Show a config's data as the model reads them: sizes, lengths, and what the loss counts."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    examples: int = 3
    """Training examples to show."""


DATA_HELP = """Splits are read, and tokenizers trained, as `fit` does it. In the examples, text in
[[double brackets]] has no part in the loss; where only few tokens have one, each is followed by
its target."""
"""Help text of `data`."""


def run_data(arguments: list[str]) -> int:
    """Print a summary of a config's data; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    options = parse_config_verb("data", arguments, DataArguments, DATA_HELP)
    if options.examples < 0:
        raise UsageError(f"examples {options.examples}: is negative; give 0 or more")
    from train.visualization.data_summary import print_summary, summarize_data

    summary = summarize_data(options.experiment, options.examples)
    if json_wanted:
        print_json(summary)
    else:
        print_summary(summary)
    return 0
