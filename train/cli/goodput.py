"""`python -m train goodput W`."""

from __future__ import annotations

import dataclasses
import json

from train.cli.parsing import parse, pop_json_flag, pop_positional


@dataclasses.dataclass(frozen=True)
class GoodputArguments:
    """What a run's time has gone into, over all its lives, one that is under way among them."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "goodput")
    parse(GoodputArguments, arguments, verb="goodput W")
    from train.errors import UserError
    from train.run_folder.folder import RunFolder
    from train.telemetry.goodput import (
        ACTIVITY_DESCRIPTIONS,
        compute_goodput,
        format_duration,
        read_time_records,
    )

    folder = RunFolder.open_existing(workdir)
    lines = read_time_records(folder.time_log)
    if not lines:
        raise UserError(
            f"{folder.time_log}: tells of no time; fit writes it, from its first step on"
        )
    found = compute_goodput(lines)
    if json_wanted:
        plain = dataclasses.asdict(found) | {
            "total": found.total,
            "share": found.productive_fraction,
        }
        print(json.dumps(plain))
        return 0
    for what, seconds in found.seconds.items():
        print(
            f"{what:9} {seconds / (found.total or 1):6.1%} {format_duration(seconds):>12}   {ACTIVITY_DESCRIPTIONS[what]}"
        )
    print(f"{'all':9} {1:6.1%} {format_duration(found.total):>12}   lives: {found.lives}")
    return 0
