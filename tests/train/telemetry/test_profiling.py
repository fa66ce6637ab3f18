"""Traces of steps: which steps they contain, where they are stored, and invalid ranges."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.support import light_compiler as light_compiler
from tests.train.support import tiny
from train.errors import UsageError
from train.run_folder.folder import RunFolder
from train.telemetry.profiling import profile_steps


def trace_events(workdir: Path) -> list[dict[str, Any]]:
    """Return the events of the only trace of a run, as Perfetto reads them."""
    [file] = (workdir / "profile").rglob("perfetto_trace.json.gz")
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return events


@pytest.mark.full
def test_trace_holds_the_named_steps(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    train.fit(tiny(tmp_path, steps=4, profile="2:3"), str(workdir), quiet=True)
    steps = [
        event["args"]["step_num"] for event in trace_events(workdir) if event.get("name") == "train"
    ]
    assert sorted(map(int, steps)) == [2, 3]
    # The file that XProf and TensorBoard's plugin read, where they expect it.
    [found] = (workdir / "profile").glob("plugins/profile/*/*.xplane.pb")
    assert found.stat().st_size > 0
    # The range may change: the run continues, and has nothing to trace.
    run = train.fit(tiny(tmp_path, steps=5, profile="1:2"), str(workdir), quiet=True)
    assert run.step == 5


def test_step_is_unwrapped_if_nothing_is_traced(tmp_path: Path) -> None:
    def step(state: int, batch: int) -> tuple[int, int]:
        return state, batch

    folder, shown = RunFolder(tmp_path), list[str]()
    with profile_steps(step, None, folder, 0, shown.append) as found:
        assert found is step
    with profile_steps(step, (2, 3), folder, 3, shown.append) as found:
        assert found is step
    assert shown == ["profile 2:3: step 3 is done already; nothing is traced"]
    assert not (tmp_path / "profile").exists()


def test_trace_is_written_although_training_stops_within_it(tmp_path: Path) -> None:
    shown = list[str]()

    def stop() -> None:
        with profile_steps(
            lambda state, batch: (0, 0), (1, 9), RunFolder(tmp_path), 0, shown.append
        ) as step:
            step(0, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert [event for event in trace_events(tmp_path) if event.get("name") == "train"]


@pytest.mark.parametrize("text", ["5", "0:3", "3:2", "2:13", "a:b", "1:2:3", "-1:2", ":", "1:"])
def test_invalid_ranges_raise(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        UsageError, match=r"^profile .*: is not a range of the run's steps; .* 12"
    ) as error:
        tiny(tmp_path, profile=text)
    assert "\n" not in str(error.value)
