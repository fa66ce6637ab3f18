"""Verbs to begin with: `configs`, `init` and `data`.

What computes is imported inside the verbs, so that `--help` loads no JAX.
"""

import dataclasses
import json
import textwrap
from typing import Annotated

import tyro

from train.cli.config_verbs import parse_config_verb
from train.cli.own_packages import program_name
from train.cli.parsing import parse, pop_json_flag, pop_positional
from train.errors import UsageError
from train.experiment import Experiment


def run_configs(arguments: list[str]) -> int:
    """List the shipped configs; return the exit status."""
    from train.config.registry import describe_shipped

    json_wanted = pop_json_flag(arguments)
    if arguments:
        raise UsageError(f"configs {arguments[0]}: takes no arguments but --json; leave it out")
    shipped = describe_shipped()
    if json_wanted:
        print(json.dumps([dataclasses.asdict(each) for each in shipped]))
        return 0
    width = max(len(each.name) for each in shipped)
    for each in shipped:
        print(f"{each.name:<{width}}  {each.summary}")
        if len(each.experiments) > 1:
            names = ", ".join(f"{each.name}:{experiment}" for experiment in each.experiments)
            indent = " " * (width + 4)
            print(textwrap.fill(names, 100, initial_indent=indent, subsequent_indent=indent))
    print(f"\n{program_name()} fit NAME trains one; init FILE writes a config of your own")
    return 0


@dataclasses.dataclass(frozen=True)
class InitArguments:
    """Write a commented config of your own, a language model on text, to change and to train."""

    data: str = ""
    """File, folder or pattern of text; default: the text that every Python carries."""


def run_init(arguments: list[str]) -> int:
    """Write a config file; return the exit status."""
    from train.config.new_config import write_config

    json_wanted = pop_json_flag(arguments)
    file = pop_positional(arguments, "FILE", "init")
    given = parse(InitArguments, arguments, verb="init FILE")
    write_config(file, given.data)
    if json_wanted:
        print(json.dumps({"file": file}))
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
    given = parse_config_verb("data", arguments, DataArguments, DATA_HELP)
    if given.examples < 0:
        raise UsageError(f"examples {given.examples}: is negative; give 0 or more")
    from train.visualization.data_summary import print_summary, summarize_data

    summary = summarize_data(given.experiment, given.examples)
    if json_wanted:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    return 0
