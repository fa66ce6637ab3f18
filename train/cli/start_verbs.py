"""Verbs to begin with: `init` and `data`."""

import dataclasses
from typing import Annotated

import tyro

from train.cli.config_verbs import ConfigArguments, parse_config_verb
from train.cli.parsing import JsonArguments, parse, print_json
from train.config.experiment_files import write_config
from train.runtime.startup import program_name
from train.visualization.data_summary import print_summary, summarize_data
from transformer.validation import NonNegativeInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitArguments(JsonArguments):
    """Write a commented config of your own, a language model on text, to change and to train."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Name of the file, ending with .py."""

    data: str = ""
    """File, folder or pattern of text; default: the text that ships with Python."""


def run_init(arguments: list[str]) -> int:
    """Write a config file; return the exit status."""
    options = parse(InitArguments, arguments, verb="init")
    write_config(options.file, options.data)
    if options.json:
        print_json({"file": options.file})
    else:
        print(f"wrote {options.file}; read it, then {program_name()} fit {options.file}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataArguments(ConfigArguments):
    """Show a config's data as the model reads them: sizes, lengths, and what the loss counts."""

    examples: NonNegativeInt = 3
    """Training examples to show."""


DATA_HELP = """Splits are read, and tokenizers trained, as `fit` does it. In the examples, text in
[[double brackets]] has no part in the loss; where only few tokens have one, each is followed by
its target."""
"""Help text of `data`."""


def run_data(arguments: list[str]) -> int:
    """Print a summary of a config's data; return the exit status."""
    options = parse_config_verb("data", arguments, DataArguments, DATA_HELP)
    summary = summarize_data(options.experiment, options.examples)
    if options.json:
        print_json(summary)
    else:
        print_summary(summary)
    return 0
