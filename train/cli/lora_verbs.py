"""Verb `merge`: an ordinary run from a LoRA run."""

import dataclasses
import json

from train.cli.parsing import parse, pop_json_flag, pop_positional
from train.errors import UsageError


@dataclasses.dataclass(frozen=True)
class MergeArguments:
    """Write the merged weights of a LoRA run to the folder of an ordinary run."""

    workdir: str = ""
    """Folder of the new run."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""


def run_merge(arguments: list[str]) -> int:
    """Merge a LoRA run; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    source = pop_positional(arguments, "W", "merge")
    given = parse(MergeArguments, arguments, verb="merge W")
    if not given.workdir:
        raise UsageError("merge: --workdir is missing; give the folder of the new run")
    from train.lora.merge import merge_run

    run = merge_run(source, given.workdir, step=given.step)
    shown = str(run.folder.path)
    print(json.dumps({"workdir": shown}) if json_wanted else f"merged weights in {shown}")
    return 0
