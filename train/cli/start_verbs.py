"""Verbs to begin with: `configs`, `init`, `data` and `completion`.

What computes is imported inside the verbs, so that `--help` loads no JAX.
"""

import dataclasses
import textwrap
from typing import Annotated

import tyro

from train.cli.config_verbs import parse_config_verb
from train.cli.main import VERBS
from train.cli.parsing import parse, pop_json_flag, pop_positional, print_json
from train.config.experiment_files import describe_shipped
from train.errors import UsageError
from train.experiment import Experiment
from train.runtime.startup import SCRIPT, program_name


def run_configs(arguments: list[str]) -> int:
    """List the shipped configs; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    if arguments:
        raise UsageError(f"configs {arguments[0]}: takes no arguments but --json; leave it out")
    shipped = describe_shipped()
    if json_wanted:
        print_json([dataclasses.asdict(each) for each in shipped])
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


SHELLS = ("bash", "zsh")

_SCRIPT = """\
_linen_transformer() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    elif ((COMP_CWORD == 2)); then
        case ${{COMP_WORDS[1]}} in
            {config_verbs})
                COMPREPLY=($(compgen -W "{configs}" -- "$word")
                           $(compgen -f -X '!*.py' -- "$word")) ;;
            {run_verbs})
                COMPREPLY=($(compgen -d -- "$word")) ;;
        esac
    fi
}}
complete -o default -F _linen_transformer {program}
"""


def completion_script(shell: str) -> str:
    """Return the script that a shell reads at its start. Raises UsageError for other shells.

    The script is static: completing a word starts no Python.
    """
    if shell not in SHELLS:
        raise UsageError(f"completion {shell}: is not supported; give one of {', '.join(SHELLS)}")
    firsts = {name: verb.arguments.partition(" ")[0] for name, verb in VERBS.items()}
    takes = {
        argument: "|".join(name for name, first in firsts.items() if first == argument)
        for argument in ("CONFIG", "W")
    }
    script = _SCRIPT.format(
        verbs=" ".join(VERBS),
        config_verbs=takes["CONFIG"],
        run_verbs=takes["W"],
        configs=" ".join(each.name for each in describe_shipped()),
        program=SCRIPT,
    )
    # zsh has no `complete` of its own: bashcompinit defines it.
    emulation = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    return emulation + script if shell == "zsh" else script


def run_completion(arguments: list[str]) -> int:
    """Print the completion script of a shell; return the exit status."""
    if pop_json_flag(arguments) or len(arguments) != 1:
        raise UsageError(f"completion: takes the name of a shell; give one of {', '.join(SHELLS)}")
    print(completion_script(arguments[0]), end="")
    return 0
