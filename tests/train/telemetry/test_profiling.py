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
    assert traced_steps(workdir) == [2, 3]
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
    with profile_steps(step, None, folder.profile, 0, shown.append) as found:
        assert found is step
    assert shown == []
    with profile_steps(step, (2, 3), folder.profile, 3, shown.append) as found:
        assert found is step
    assert len(shown) == 1
    assert not (tmp_path / "profile").exists()


def traced_steps(workdir: Path) -> list[int]:
    events = [event for event in trace_events(workdir) if event.get("name") == "train"]
    return sorted(int(event["args"]["step_num"]) for event in events)


@pytest.mark.parametrize(("start", "stop", "traced"), [(0, 9, [2, 3]), (2, 9, [3]), (0, 2, [2])])
def test_trace_holds_the_asked_steps_also_if_training_stops_within(
    tmp_path: Path, start: int, stop: int, traced: list[int]
) -> None:
    folder = RunFolder(tmp_path)

    def train() -> None:
        with profile_steps(
            lambda *_: (0, 0), (2, 3), folder.profile, start, lambda _: None
        ) as step:
            for _ in range(start, stop):
                step(0, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert traced_steps(tmp_path) == traced


@pytest.mark.parametrize("text", ["5", "0:3", "3:2", "2:13", "a:b"])
def test_invalid_ranges_raise(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="is not a range of the run's steps"):
        tiny(tmp_path, profile=text)
