import json
import math
import pathlib
import signal
import struct
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest
from tensorboardX.proto import event_pb2

from tests.train.object_store import bucket as bucket
from train.files import AnyPath
from train.run_folder.folder import RunFolder
from train.telemetry.metrics_log import FLUSH_INTERVAL_SECONDS, MetricsLog, read_metrics


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunFolder:
    return RunFolder(tmp_path)


def write_steps(run: RunFolder, first: int, last: int, resume: int | None) -> Any:
    with MetricsLog(run.metrics, run.tensorboard) as log:
        aside = log.set_aside_after(resume)
        for step in range(first, last + 1):
            log.write(step, "train", {"loss": step / 7})
    return aside


def steps(run: RunFolder) -> list[int]:
    return [line["step"] for line in read_metrics(run.metrics)]


def test_lines_are_flushed_and_read_back_exactly(run: RunFolder) -> None:
    values = {"loss": 0.1 + 0.2, "grad_norm": 5e-324, "learning_rate": 6e-4, "tokens": 2**63}
    with MetricsLog(run.metrics, run.tensorboard) as log:
        log.write(3, "train", values)
        log.write(3, "validation", {"loss": jnp.float32(1) / 3})
        text = run.metrics.read_text()
    first, second = text.splitlines()
    assert first.startswith('{"step": 3, "split": "train", "loss": 0.30000000000000004, ')
    assert json.loads(first) == {"step": 3, "split": "train", **values}
    assert json.loads(second)["loss"] == float(jnp.float32(1) / 3)


def test_non_finite_values_are_strings_in_the_file(run: RunFolder) -> None:
    with MetricsLog(run.metrics, run.tensorboard) as log:
        log.write(1, "train", {"loss": math.nan, "up": math.inf, "down": jnp.float32(-jnp.inf)})
    raw = json.loads(run.metrics.read_text(), parse_constant=pytest.fail)
    assert (raw["loss"], raw["up"], raw["down"]) == ("NaN", "Infinity", "-Infinity")
    with run.metrics.open("a") as file:
        file.write('{"loss": 3}\n')  # by no run
    [line] = read_metrics(run.metrics)
    assert math.isnan(line["loss"])
    assert (line["up"], line["down"]) == (math.inf, -math.inf)


def test_resume_sets_later_and_torn_lines_aside(run: RunFolder) -> None:
    assert write_steps(run, 0, 5, resume=None) is None
    with run.metrics.open("ab") as file:
        file.write('{"step": 4, "split": "tr\u00fc'.encode()[:-1])
    text = run.metrics.read_bytes()
    assert steps(run) == [0, 1, 2, 3, 4, 5]
    aside = write_steps(run, 4, 6, resume=3)
    assert aside.name == "metrics.jsonl.beyond-3"
    assert steps(run) == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_metrics(aside)] == [4, 5]
    kept = run.metrics.read_bytes()
    assert text.startswith(kept[: kept.index(b'{"step": 4')])
    assert aside.read_text(errors="replace").splitlines()[-1].startswith('{"step": 4, "split": "tr')
    # A second resume at the same step loses no lines.
    assert write_steps(run, 4, 4, resume=3).name == "metrics.jsonl.beyond-3.2"
    assert write_steps(run, 5, 5, resume=4) is None
    # Without a checkpoint all lines are set aside, that of step 0 too.
    aside = write_steps(run, 0, 1, resume=None)
    assert [line["step"] for line in read_metrics(aside)] == [0, 1, 2, 3, 4, 5]
    assert steps(run) == [0, 1]


def test_killed_process_loses_no_lines(run: RunFolder) -> None:
    program = (
        "import os, signal, sys\n"
        "from train.telemetry.metrics_log import MetricsLog\n"
        "from train.run_folder.folder import RunFolder\n"
        "run = RunFolder.create(sys.argv[1])\n"
        "log = MetricsLog(run.metrics, run.tensorboard)\n"
        "for step in range(17):\n"
        "    log.write(step, 'train', {'loss': 1.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(run.path)])
    assert killed.returncode == -signal.SIGKILL
    assert steps(run) == list(range(17))


def events(folder: AnyPath) -> list[event_pb2.Event]:
    """Return the events in a TensorBoard folder, oldest file first."""
    result = []
    for file in sorted(folder.iterdir(), key=str):
        data = file.read_bytes()
        while data:  # length (8 bytes), its checksum (4), the event, its checksum (4)
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event()
            event.ParseFromString(data[12 : 12 + length])
            result.append(event)
            data = data[16 + length :]
    return result


def test_tensorboard_has_one_folder_per_split(run: RunFolder) -> None:
    with MetricsLog(run.metrics, run.tensorboard) as log:
        log.set_aside_after(None)
        log.write(5, "train", {"loss": 2.5, "grad_norm": math.nan, "note": "warm-up"})
        log.write(5, "validation", {"loss": 2.75})
    assert sorted(path.name for path in run.tensorboard.iterdir()) == ["train", "validation"]
    version, session, scalars = events(run.path / "tensorboard" / "train")
    assert version.file_version == "brain.Event:2"
    assert (session.session_log.status, session.step) == (event_pb2.SessionLog.START, 0)
    values = {value.tag: value.simple_value for value in scalars.summary.value}
    assert scalars.step == 5
    assert values["loss"] == 2.5
    assert math.isnan(values["grad_norm"])
    assert [*values] == ["loss", "grad_norm"]


def test_tensorboard_hides_lines_set_aside(run: RunFolder) -> None:
    write_steps(run, 1, 5, resume=None)
    write_steps(run, 4, 5, resume=3)
    starts = [event.step for event in events(run.path / "tensorboard" / "train")]
    assert starts == [0, 0, 1, 2, 3, 4, 5, 0, 4, 4, 5]


def test_object_store_is_written_periodically_and_at_close(bucket: str) -> None:
    run = RunFolder.create(f"{bucket}/run")
    now = 0.0
    log = MetricsLog(run.metrics, run.tensorboard, clock=lambda: now)
    log.set_aside_after(None)
    log.write(1, "train", {"loss": 1.0})
    assert not run.metrics.exists()
    now = FLUSH_INTERVAL_SECONDS
    log.write(2, "train", {"loss": 2.0})
    assert steps(run) == [1, 2]
    assert [event.step for event in events(run.tensorboard / "train")] == [0, 0, 1, 2]
    log.write(3, "train", {"loss": 3.0})
    assert steps(run) == [1, 2]
    log.close()
    assert steps(run) == [1, 2, 3]
    assert [event.step for event in events(run.tensorboard / "train")] == [0, 0, 1, 2, 3]
    with MetricsLog(run.metrics, run.tensorboard) as log:
        log.set_aside_after(1)
    assert steps(run) == [1]
