"""Two processes that train together make the same rollback decisions."""

from pathlib import Path

import pytest

from tests.train.processes import run_two_processes
from tests.train.support import lines_of, write_text

PROGRAM = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from bench.drills.faults import Fault, planted
from tests.train.recovery.test_whole_runs import POISON, an_experiment
import train
folder = Path(sys.argv[3])
with planted(POISON):
    run = train.fit(an_experiment(folder, steps=34), str(folder / "run"), quiet=True)
print(run.final_metrics["loss"])
"""


@pytest.mark.full
def test_two_processes_roll_back_together(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    one, other = run_two_processes(PROGRAM, tmp_path)
    assert one == other
    events = lines_of(tmp_path / "run" / "logbook.jsonl")
    names = [line["event"] for line in events if line["event"] not in ("saved", "weights")]
    assert names == ["started", "skipped", "skipped", "rolled back", "recovered", "finished"]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {"16", "rolled-back-1-24", "34"} <= kept
    assert (tmp_path / "run" / "spikes" / "28").is_dir()
