"""Several processes on one machine stand in for several hosts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import distributed, xla_bridge

from tests.train.support import lines_of, write_config
from train.errors import UserError
from train.parallel.distributed import (
    Coordinator,
    find_coordinator,
    initialize_distributed,
)

TWO = {"JAX_COORDINATOR_ADDRESS": "there:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({}, None),
        (TWO, Coordinator("there:1", 2, 1)),
        ({**TWO, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, Coordinator(None)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # the batch script itself, not a task started by srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, Coordinator(None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, Coordinator(None)),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "0"}, Coordinator(None)),
        ({"KUBERNETES_SERVICE_HOST": "a"}, None),
    ],
)
def test_coordinator_address_from_the_environment(
    environment: dict[str, str], where: Coordinator | None
) -> None:
    assert find_coordinator({"JAX_PLATFORMS": "cpu", **environment}) == where


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_NUM_PROCESSES": ""}, r"JAX_NUM_PROCESSES \(not set\): give a number"),
        ({"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID one: give a number"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID 2: give one from 0 to 1"),
    ],
)
def test_incomplete_distributed_settings_raise(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_coordinator({**TWO, **changes})


def test_hosts_that_jax_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(*arguments: Any, **more: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    pod = {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "0"}
    with pytest.raises(UserError, match=r"could not connect .*on every host"):
        initialize_distributed({"JAX_PLATFORMS": "cpu", **pod})


TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2"}
EIGHT = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("num_tasks", "local_index", "environment", "devices"),
    [
        (2, 0, EIGHT, "all"),  # one task a node
        (2, 0, {}, "all"),
        (16, 5, EIGHT, "5"),  # one task a GPU
        (16, 5, {}, "5"),
        (16, 5, {**EIGHT, "CUDA_VISIBLE_DEVICES": "0"}, "all"),  # bound by --gpus-per-task=1
        (4, 1, {**EIGHT, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "all"),  # and by --gpus-per-task=4
        (2, 0, {**EIGHT, "JAX_LOCAL_DEVICE_IDS": "2,3"}, "2,3"),
        (2, 0, {**EIGHT, "JAX_COORDINATOR_ADDRESS": "node1:7", "JAX_NUM_PROCESSES": "2"}, "all"),
    ],
)
def test_gpus_of_a_slurm_task(
    num_tasks: int,
    local_index: int,
    environment: dict[str, str],
    devices: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX detects the cluster and chooses the GPUs; only the connection is replaced."""
    task = {**TASK, "SLURM_LOCALID": str(local_index), "SLURM_NTASKS": str(num_tasks)}
    task |= {"SLURM_PROCID": "1", "JAX_PROCESS_ID": "1", "SLURM_STEP_NUM_TASKS": str(num_tasks)}
    task |= environment
    connected = []

    def connect(address: str, process_index: int, **options: Any) -> None:
        connected.append((address, process_index))
        raise RuntimeError("no network")

    for name, value in task.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "global_state", distributed.State())
    monkeypatch.setattr("jax._src.distributed._jax.get_distributed_runtime_client", connect)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    try:
        with pytest.raises(UserError, match="could not connect"):
            initialize_distributed(task)
        assert connected == [(environment.get("JAX_COORDINATOR_ADDRESS", "node1:61447"), 1)]
        assert jax.config.read("jax_cuda_visible_devices") == devices
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")


class Hosts:
    """Processes that run `fit` together."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, write_config(folder, batch_size="8")
        self.running: list[subprocess.Popen[str]] = []

    def start(self, count: int, *arguments: str, devices: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        for index in range(count):
            environment = {
                **os.environ,
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                "JAX_NUM_CPU_DEVICES": str(devices),
            }
            line = ("fit", self.config, "--workdir", str(self.folder / "run"), "--quiet")
            self.running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "train", *line, "--log-every", "1", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parents[3],
                    env=environment,
                )
            )

    def ends(self, timeout: float = 400) -> list[tuple[int, str]]:
        """Return the exit status of each process and its standard error."""
        said = [process.communicate(timeout=timeout)[1] for process in self.running]
        actual = [(p.returncode, each) for p, each in zip(self.running, said, strict=True)]
        self.running = []
        return actual

    def losses(self) -> dict[int, float]:
        lines = lines_of(self.folder / "run" / "metrics.jsonl")
        return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    result = Hosts(tmp_path)
    yield result
    for process in result.running:
        process.kill()
        process.communicate()


LOST = """
import os, signal, sys
from train.parallel.distributed import exit_process, initialize_distributed

initialize_distributed()
import jax
from jax.experimental import multihost_utils

multihost_utils.sync_global_devices("started")
if jax.process_index() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else exit_process(1)
multihost_utils.broadcast_one_to_all(jax.numpy.ones(3))  # waits for the other process
"""


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_lost_process_ends_the_other(lost: int, how: str) -> None:
    """At once if a collective breaks, else after the minute of JAX's heartbeats."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", LOST, str(lost), how],
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            env={**os.environ, **TWO, "JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": index},
        )
        for index in ("0", "1")
    ]
    ended = [process.communicate(timeout=150)[1] for process in both]
    assert all(process.returncode for process in both), ended


@pytest.mark.nightly
def test_notice_to_one_process_stops_both_between_saves(hosts: Hosts, tmp_path: Path) -> None:
    """Orbax's manager asks JAX for preemptions too, and would count its questions with ours."""
    hosts.start(2, "--checkpoint.every", "2", "--steps", "100000")
    wait_until(lambda: len(finished_steps(tmp_path / "run" / "checkpoints")) >= 2)
    hosts.running[1].send_signal(signal.SIGTERM)
    assert [status for status, _ in hosts.ends()] == [75] * 2
    events = lines_of(tmp_path / "run" / "logbook.jsonl")
    assert events[-1]["event"] == "preempted"
    assert max(finished_steps(tmp_path / "run" / "checkpoints")) == events[-1]["step"]


@pytest.mark.nightly
def test_one_of_four_killed_and_resumed_by_two(hosts: Hosts, tmp_path: Path) -> None:
    """With a schedule that does not depend on the number of steps."""
    every = ("--checkpoint.every", "3", "--schedule.kind", "inverse_sqrt")
    hosts.start(4, *every, "--steps", "100000")
    wait_until(lambda: len(finished_steps(tmp_path / "run" / "checkpoints")) >= 2)
    hosts.running[3].send_signal(signal.SIGKILL)
    *others, killed = hosts.ends(timeout=120)
    assert killed[0] == -signal.SIGKILL
    for status, said in others:
        # The error of a collective, or JAX's abort after a minute without heartbeats.
        assert status in (1, -signal.SIGABRT), said

    last = max(finished_steps(tmp_path / "run" / "checkpoints")) + 3
    hosts.start(2, *every, "--steps", str(last), devices=2)
    assert [status for status, _ in hosts.ends()] == [0] * 2
    together = hosts.losses()
    assert sorted(together) == list(range(1, last + 1))
    events = [line["event"] for line in lines_of(tmp_path / "run" / "logbook.jsonl")]
    assert events.count("started") == 1  # one of them reports

    (tmp_path / "run").rename(tmp_path / "of several")
    hosts.start(1, *every, "--steps", str(last), devices=4)
    assert [status for status, _ in hosts.ends()] == [0]
    assert hosts.losses() == pytest.approx(together, rel=1e-5)


def finished_steps(folder: Path) -> list[int]:
    """Return the steps of committed checkpoints."""
    return [int(each.name) for each in folder.glob("[0-9]*") if each.name.isdecimal()]


def wait_until(condition: Any, seconds: float = 300) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.2)


def test_skypilot_recipe_sets_the_coordinator() -> None:
    import yaml

    task = yaml.safe_load((Path(__file__).parents[3] / "cloud" / "sky.yaml").read_text())
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    assert all(name in task["run"] for name in names)
