"""The verb `goodput W`."""

from __future__ import annotations

import dataclasses
import json

from train.cli.parsing import parse, pop_json_flag, pop_positional


@dataclasses.dataclass(frozen=True)
class GoodputArguments:
    """Print how a run's time was spent, over all its processes, including a running one."""


def main(arguments: list[str]) -> int:
    """Print a run's goodput; return the exit status."""
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
    records = read_time_records(folder.time_log)
    if not records:
        raise UserError(f"{folder.time_log}: has no records; fit writes it from its first step on")
    goodput = compute_goodput(records)
    if json_wanted:
        plain = dataclasses.asdict(goodput) | {
            "total": goodput.total,
            "share": goodput.productive_fraction,
        }
        print(json.dumps(plain))
        return 0
    for activity, seconds in goodput.seconds.items():
        print(
            f"{activity:9} {seconds / (goodput.total or 1):6.1%} "
            f"{format_duration(seconds):>12}   {ACTIVITY_DESCRIPTIONS[activity]}"
        )
    print(f"{'all':9} {1:6.1%} {format_duration(goodput.total):>12}   lives: {goodput.lives}")
    return 0
