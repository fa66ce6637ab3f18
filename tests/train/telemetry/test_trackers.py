"""What wandb and mlflow receive: fakes with the same calls stand in for the packages."""

import dataclasses
import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.support import NO_DETECTOR, lines_of, tiny
from tests.train.support import light_compiler as light_compiler
from train.config.io import experiment_to_dict, flatten_experiment
from train.errors import UsageError, UserError
from train.experiment import Experiment, SampleConfig, TrackingConfig
from train.run_folder.folder import RunFolder
from train.runtime.signals import PreemptedError
from train.telemetry import trackers
from train.telemetry.trackers import Trackers


class FakeWandb(types.ModuleType):
    """The calls of the wandb package that the trainer makes. Runs are stored by id."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, Any] = {}
        self.Settings = lambda **settings: settings
        self.Html = lambda text, inject: text

    def init(self, **options: Any) -> Any:
        run = self.runs.get(options["id"])
        if run is None:
            run = types.SimpleNamespace(logged=[], summary={}, exits=[], preempting=0, starts=[])
            self.runs[options["id"]] = run
        run.starts.append(options)
        run.log = run.logged.append
        run.define_metric = lambda *name, **options: None
        run.finish = lambda exit_code: run.exits.append(exit_code)

        def mark_preempting() -> None:
            run.preempting += 1

        run.mark_preempting = mark_preempting
        return run


class FakeMlflow(types.ModuleType):
    """The calls of the mlflow package that the trainer makes. It stores runs as a server does."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Any] = {}
        pair = types.SimpleNamespace
        self.entities = pair(
            Param=lambda key, value: pair(key=key, value=value),
            Metric=lambda key, value, time, step: pair(key=key, value=value, step=step),
        )

    def MlflowClient(self) -> "FakeMlflow":
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        actual = self.experiments.get(name)
        return actual and types.SimpleNamespace(experiment_id=actual)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = types.SimpleNamespace(
            experiment=experiment_id, name=run_name, params={}, metrics=[], texts={}, status=[]
        )
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].status.append(status)

    def log_batch(self, run_id: str, params: Any = (), metrics: Any = ()) -> None:
        assert len(params) <= 100  # a limit of the server
        for param in params:
            assert self.runs[run_id].params.setdefault(param.key, param.value) == param.value
        self.runs[run_id].metrics += [(each.step, each.key, each.value) for each in metrics]

    def log_text(self, run_id: str, text: str, path: str) -> None:
        self.runs[run_id].texts[path] = text

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].status.append(status)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    module = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "run"))


def experiment_with(tmp_path: Path, *names: Any) -> Experiment:
    return tiny(tmp_path, tracking=TrackingConfig(names, project="study"))


def track(
    folder: RunFolder, experiment: Experiment, warn: Callable[[str], None], error: Any = None
) -> None:
    result = Trackers(folder, experiment, warn)
    result.log(1, "train", {"loss": 2.0, "grad_norm": float("nan")})
    result.log(2, "validation", {"loss": 1.5})
    result.log_sample(2, "a <text>")
    result.close(error)


def test_trackers_receive_config_metrics_samples_and_outcome(
    tmp_path: Path, folder: RunFolder, wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    experiment, warnings = experiment_with(tmp_path, "wandb", "mlflow"), list[str]()
    track(folder, experiment, warnings.append)
    ids = json.loads(folder.trackers.read_text())
    [run] = wandb.runs.values()
    assert ids == {"wandb": next(iter(wandb.runs)), "mlflow": "run0"}
    [start] = run.starts
    assert (start["project"], start["name"], start["resume"]) == ("study", "tiny", "allow")
    assert start["config"] == experiment_to_dict(experiment)
    assert [line["step"] for line in run.logged] == [1, 2, 2]
    assert run.logged[0]["train/loss"] == 2.0
    assert run.logged[1] == {"step": 2, "validation/loss": 1.5}
    assert run.logged[2]["sample"] == "<pre>a &lt;text&gt;</pre>"
    assert (run.summary, run.exits, run.preempting) == ({"outcome": "finished"}, [0], 0)
    kept = mlflow.runs["run0"]
    assert kept.params == {n: str(v) for n, v in flatten_experiment(experiment).items()}
    assert {(step, name) for step, name, _ in kept.metrics} == {
        (1, "train/loss"), (1, "train/grad_norm"), (2, "validation/loss"),
    }  # fmt: skip
    assert kept.texts == {"samples/step-00000002.txt": "a <text>"}
    assert kept.status == ["FINISHED"]
    assert not warnings


def test_resumed_run_continues_the_tracked_runs(
    tmp_path: Path, folder: RunFolder, wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    experiment = experiment_with(tmp_path, "wandb", "mlflow")
    track(folder, experiment, pytest.fail, PreemptedError("stopped"))
    # A setting that a resume may change: MLflow refuses a parameter with another value.
    track(folder, dataclasses.replace(experiment, steps=99), pytest.fail, ValueError("bug"))
    [run] = wandb.runs.values()
    assert [start["id"] for start in run.starts] == 2 * list(wandb.runs)
    assert (run.exits, run.preempting, run.summary) == ([1, 1], 1, {"outcome": "failed"})
    [kept] = mlflow.runs.values()
    assert kept.status == ["KILLED", "RUNNING", "FAILED"]
    assert len(kept.metrics) == 6


@pytest.mark.parametrize("call", ["init", "log"])
def test_failing_tracker_warns_once_and_is_dropped(
    tmp_path: Path, folder: RunFolder, wandb: FakeWandb, mlflow: FakeMlflow, call: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route to the server\nmore")

    def init(**options: Any) -> Any:
        run = FakeWandb.init(wandb, **options)
        run.log = fail
        return run

    wandb.init = fail if call == "init" else init  # type: ignore[method-assign]
    warnings = list[str]()
    track(folder, experiment_with(tmp_path, "wandb", "mlflow"), warnings.append)
    [warning] = warnings
    assert warning.startswith("tracking.trackers wandb: no route to the server; the run goes on ")
    assert mlflow.runs["run0"].status == ["FINISHED"]


def test_hanging_tracker_does_not_block_the_run(
    tmp_path: Path, folder: RunFolder, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    wandb.init = lambda **options: release.wait(60)  # type: ignore[method-assign]
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    warnings = list[str]()
    track(folder, experiment_with(tmp_path, "wandb"), warnings.append)
    release.set()
    [warning] = warnings
    assert "wandb: has not sent everything in 0.05 s" in warning


def test_only_the_main_process_has_trackers(
    tmp_path: Path, folder: RunFolder, wandb: FakeWandb
) -> None:
    result = Trackers(
        folder, experiment_with(tmp_path, "wandb"), pytest.fail, is_main_process=False
    )
    result.log(1, "train", {"loss": 1.0})
    result.close(None)
    assert not wandb.runs
    assert not folder.trackers.exists()


def test_missing_package_raises_before_training(
    tmp_path: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="mlflow: is not installed"):
        Trackers(folder, experiment_with(tmp_path, "mlflow"), pytest.fail)


def test_invalid_settings_raise() -> None:
    with pytest.raises(UsageError, match="name each once"):
        TrackingConfig(("wandb", "wandb"))
    with pytest.raises(UsageError, match="is empty"):
        TrackingConfig(project="")
    with pytest.raises(UsageError, match="'comet' is not known"):
        TrackingConfig(("comet",))  # type: ignore[arg-type]


def test_run_sends_the_contents_of_its_own_files(tmp_path: Path, wandb: FakeWandb) -> None:
    experiment = tiny(
        tmp_path,
        num_layers=1,
        dropout=0.0,
        steps=3,
        tracking=TrackingConfig(("wandb",), project="study"),
        recovery=NO_DETECTOR,
        sample=SampleConfig(every=3, prompt="the", max_new_tokens=3),
    )
    workdir = tmp_path / "run"
    train.fit(experiment, str(workdir), quiet=True)
    [run] = wandb.runs.values()
    sent = [
        {name.partition("/")[2]: value for name, value in line.items() if "/" in name}
        for line in run.logged
        if "sample" not in line
    ]
    written = [
        {name: value for name, value in line.items() if name not in ("step", "split")}
        for line in lines_of(workdir / "metrics.jsonl")
    ]
    assert sent == written
    assert [line["step"] for line in run.logged if "sample" in line] == [3]
    assert run.exits == [0]
