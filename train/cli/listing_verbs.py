"""Verbs that work without JAX: `configs`, `completion`, and `doctor`, which may find it broken."""

import dataclasses
import json
import textwrap

from train.cli.doctor import run_checks
from train.cli.main import VERBS
from train.config.shipped import shipped_configs
from train.errors import UsageError
from train.runtime.startup import SCRIPT, program_name


def run_configs(arguments: list[str]) -> int:
    """List the shipped configs; return the exit status."""
    if arguments not in ([], ["--json"]):
        raise UsageError(f"configs {arguments[0]}: takes no arguments but --json; leave it out")
    shipped = shipped_configs()
    if arguments:
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
        configs=" ".join(each.name for each in shipped_configs()),
        program=SCRIPT,
    )
    # zsh has no `complete` of its own: bashcompinit defines it.
    emulation = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    return emulation + script if shell == "zsh" else script


def run_completion(arguments: list[str]) -> int:
    """Print the completion script of a shell; return the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(f"completion: takes the name of a shell; give one of {', '.join(SHELLS)}")
    print(completion_script(arguments[0]), end="")
    return 0


def run_doctor(arguments: list[str]) -> int:
    """Print a report of this machine; return 1 if it has a problem."""
    if arguments not in ([], ["--json"]):
        raise UsageError(f"doctor {arguments[0]}: takes no arguments but --json; leave it out")
    report = run_checks()
    if arguments:
        print(json.dumps(report.as_dict()))
    else:
        report.print()
    return 0 if report.ok else 1
