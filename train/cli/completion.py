"""Shell completion of the console script: verbs, shipped configs and folders.

The script is static: completing a word starts no Python.
"""

from train.cli.main import VERBS
from train.cli.own_packages import SCRIPT
from train.cli.parsing import pop_json_flag
from train.config.registry import describe_shipped
from train.errors import UsageError

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
    """Return the script that a shell reads at its start. Raises UsageError for other shells."""
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
    # zsh runs bash's completions once it is told to.
    emulation = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    return emulation + script if shell == "zsh" else script


def run_completion(arguments: list[str]) -> int:
    """Print the completion script of a shell; return the exit status."""
    if pop_json_flag(arguments) or len(arguments) != 1:
        raise UsageError(f"completion: takes the name of a shell; give one of {', '.join(SHELLS)}")
    print(completion_script(arguments[0]), end="")
    return 0
