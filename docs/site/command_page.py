"""The reference of the command line, generated from its verbs and their argument classes."""

import dataclasses
import importlib
from typing import Annotated, get_args, get_origin, get_type_hints

import tyro

from docs.site.field_docs import field_docs
from docs.site.settings_page import describe_field, one_line
from train.cli.main import VERBS
from train.experiment import Experiment

_INTRODUCTION = """# Commands

`python -m train VERB ...`, or `linen-transformer VERB ...` where the package is installed. `CONFIG`
is the name of a shipped config (`gpt2`, `gpt2:medium`) or the path of a `.py` file; `W` is the
folder of a run. Verbs that take `CONFIG` also take every [setting](settings.md) as a flag.

| flag of every verb | effect |
| --- | --- |
| `--help` | list the options of the verb, and the settings of a `CONFIG` that many change |
| `--help-all`, `--help PART` | list all settings of a `CONFIG`, or those of a part |
| `--json` | print one JSON object on standard output |
| `--debug` | print the traceback of an error |
| `--import MODULE` | import code of your own first (verbs that read experiments) |

Exit status: 0 success; 1 error; 2 usage error; 75 preempted, with a checkpoint saved.
"""


def commands_page() -> str:
    """Return the page: usage, purpose and options of each verb."""
    parts = [_INTRODUCTION]
    for name, verb in VERBS.items():
        usage = f"python -m train {name} {verb.arguments}".strip()
        parts.append(f"## {name}\n\n{verb.summary[0].upper()}{verb.summary[1:]}.\n")
        parts.append(f"```text\n{usage}\n```\n")
        module = importlib.import_module(f"train.cli.{verb.module}")
        options = getattr(module, f"{name.title()}Arguments", None)
        if options is None:
            continue
        docs, hints = field_docs(options), get_type_hints(options, include_extras=True)
        rows = []
        for field in dataclasses.fields(options):
            hint = hints[field.name]
            is_annotated = get_origin(hint) is Annotated
            metadata = get_args(hint)[1:] if is_annotated else ()
            hint = get_args(hint)[0] if is_annotated else hint
            # The settings of an experiment have a page; arguments without a flag are in the usage.
            if hint is Experiment or tyro.conf.Positional in metadata or field.name == "json":
                continue
            kind, default = describe_field(field, hint)
            renamed = [each.name for each in metadata if getattr(each, "name", None)]
            flag = "".join(renamed) or field.name.replace("_", "-")
            rows.append(
                f"| `--{flag}` | {kind} | {default} | {one_line(docs.get(field.name, ''))} |"
            )
        if rows:
            parts.append("| option | type | default | effect |\n| --- | --- | --- | --- |")
            parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)
