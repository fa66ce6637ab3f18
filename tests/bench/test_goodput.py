import sys
from pathlib import Path

import pytest

from bench.drills.goodput import run_killed, to_first_step

SLOW_TO_START = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / str(len(list(folder.iterdir())))).touch()
time.sleep(0 if len(list(folder.iterdir())) > 2 else 600)
"""


@pytest.mark.full
def test_command_is_restarted_until_it_finishes(tmp_path: Path) -> None:
    assert run_killed([sys.executable, "-c", SLOW_TO_START, str(tmp_path)], every=2.0) == 2


def test_failed_command_is_not_restarted() -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        run_killed([sys.executable, "-c", "raise SystemExit('no such thing')"], every=60.0)


def test_time_to_first_step_of_each_start() -> None:
    seconds = {"start": 3.0, "restore": 0.5, "compile": 2.0, "step": 7.0}
    lines = [
        {"began": 20.0, "seconds": {**seconds, "start": 1.0}},
        {"began": 10.0, "seconds": {**seconds, "step": 0.0}},
        {"began": 10.0, "seconds": seconds},
    ]
    assert to_first_step(lines) == [5.5, 3.5]
