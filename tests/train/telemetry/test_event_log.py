import datetime
import json
import pathlib

import jax.numpy as jnp
import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.files import expand_path
from train.telemetry import event_log
from train.telemetry.event_log import EventLog


def test_each_event_is_a_line_with_a_timestamp(tmp_path: pathlib.Path) -> None:
    logbook = EventLog(tmp_path / "logbook.jsonl")
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    logbook.write("started", step=0)
    logbook.write("fell back", what="attend", reason="no cuDNN")
    first, second = map(json.loads, logbook.path.read_text().splitlines())
    times = [datetime.datetime.fromisoformat(line.pop("time")) for line in (first, second)]
    assert first == {"event": "started", "step": 0}
    assert second == {"event": "fell back", "what": "attend", "reason": "no cuDNN"}
    assert before <= times[0] <= times[1]
    assert times[0].utcoffset() == datetime.timedelta(0)


def test_values_unknown_to_json_are_written_as_text(tmp_path: pathlib.Path) -> None:
    logbook = EventLog(tmp_path / "logbook.jsonl")
    logbook.write(
        "odd",
        path=tmp_path,
        loss=jnp.float32(0.1),
        mesh={"data": (2, float("inf"))},
        name="\udc80 ü\u2028",
    )
    [event] = logbook.read()
    assert event["path"] == str(tmp_path)
    assert event["loss"] == float(jnp.float32(0.1))
    assert event["mesh"] == {"data": [2, "Infinity"]}
    assert event["name"] == "\udc80 ü\u2028"


@pytest.mark.parametrize("torn", ['{"time": "2026-', "[" * 99_999], ids=["torn", "nested"])
def test_torn_line_is_skipped(tmp_path: pathlib.Path, torn: str) -> None:
    logbook = EventLog(tmp_path / "logbook.jsonl")
    assert logbook.read() == []
    logbook.write("started")
    with logbook.path.open("a") as file:
        file.write(torn)
    logbook.write("resumed")
    assert [event["event"] for event in logbook.read()] == ["started", "resumed"]


def test_unwritable_log_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        EventLog(tmp_path).write("started")


def test_object_store_has_complete_lines(bucket: str) -> None:
    path = expand_path(f"{bucket}/logbook.jsonl")
    path.write_text('{"event": "started"}\n{"ev')
    event_log.append_records(path, [{"event": "resumed"}, {"event": "finished"}])
    assert [line["event"] for line in event_log.read_records(path)] == [
        "started",
        "resumed",
        "finished",
    ]
