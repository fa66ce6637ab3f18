"""What wandb and mlflow receive: fakes with the same calls stand in for the packages."""

import dataclasses
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import train
from tests.train.support import NO_DETECTOR, lines_of, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.config.io import flatten_experiment
from train.errors import UsageError, UserError
from train.experiment import Experiment, SampleConfig
from train.reporter import Reporter
from train.run_folder.folder import RunFolder
from train.runtime.signals import PreemptedError
from train.telemetry import trackers
from train.telemetry.goodput import ActivityTimer
from train.telemetry.trackers import Trackers, TrackingConfig


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in of the package, whose calls are recorded. There is one run."""
    module = MagicMock()
    module.Html = lambda text, inject: text
    module.init.return_value.summary = {}
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def logged(wandb: Any) -> list[dict[str, Any]]:
    return [call.args[0] for call in wandb.init.return_value.log.call_args_list]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in of the client, whose calls are recorded."""
    module = MagicMock()
    module.entities.Param = lambda key, value: (key, value)
    module.entities.Metric = lambda key, value, time, step: (step, key, value)
    client = module.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "run0"
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return client


def batches(mlflow: Any, kind: str) -> list[list[Any]]:
    calls = [call.kwargs for call in mlflow.log_batch.call_args_list]
    return [call[kind] for call in calls if kind in call]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "run"))


def experiment_with(tmp_path: Path, *names: Any) -> Experiment:
    return tiny(tmp_path, tracking=TrackingConfig(names, project="study"))


def start(folder: RunFolder, experiment: Experiment, warn: Callable[[str], None]) -> Trackers:
    settings = flatten_experiment(experiment)
    return Trackers(experiment.tracking, folder.path, experiment.name, settings, warn)


def track(
    folder: RunFolder, experiment: Experiment, warn: Callable[[str], None], error: Any = None
) -> None:
    result = start(folder, experiment, warn)
    result.log(1, "train", {"loss": 2.0, "grad_norm": float("nan")})
    result.log(2, "validation", {"loss": 1.5})
    result.log_sample(2, "a <text>")
    result.close(error)


def test_trackers_receive_config_metrics_samples_and_outcome(
    tmp_path: Path, folder: RunFolder, wandb: Any, mlflow: Any
) -> None:
    experiment = experiment_with(tmp_path, "wandb", "mlflow")
    track(folder, experiment, pytest.fail)
    init, run = wandb.init.call_args.kwargs, wandb.init.return_value
    assert json.loads(folder.trackers.read_text()) == {"wandb": init["id"], "mlflow": "run0"}
    assert (init["project"], init["name"], init["resume"]) == ("study", "tiny", "allow")
    assert init["config"] == flatten_experiment(experiment)
    first, second, sample = logged(wandb)
    assert (first["step"], first["train/loss"]) == (1, 2.0)
    assert second == {"step": 2, "validation/loss": 1.5}
    assert sample == {"step": 2, "sample": "<pre>a &lt;text&gt;</pre>"}
    assert run.summary == {"outcome": "finished"}
    run.finish.assert_called_once_with(exit_code=0)
    run.mark_preempting.assert_not_called()

    parts = batches(mlflow, "params")
    assert all(len(part) <= 100 for part in parts)  # a limit of the server
    sent = dict(param for part in parts for param in part)
    assert sent == {name: str(value) for name, value in flatten_experiment(experiment).items()}
    values = {metric[:2] for part in batches(mlflow, "metrics") for metric in part}
    assert values == {(1, "train/loss"), (1, "train/grad_norm"), (2, "validation/loss")}
    mlflow.log_text.assert_called_once_with("run0", "a <text>", "samples/step-00000002.txt")
    mlflow.set_terminated.assert_called_once_with("run0", status="FINISHED")


def test_resumed_run_continues_the_tracked_runs(
    tmp_path: Path, folder: RunFolder, wandb: Any, mlflow: Any
) -> None:
    experiment = experiment_with(tmp_path, "wandb", "mlflow")
    track(folder, experiment, pytest.fail, PreemptedError("stopped"))
    sent = len(batches(mlflow, "params"))
    # A setting that a resume may change: MLflow refuses a parameter with another value.
    track(folder, dataclasses.replace(experiment, steps=99), pytest.fail, ValueError("bug"))
    run = wandb.init.return_value
    assert len({each.kwargs["id"] for each in wandb.init.call_args_list}) == 1
    assert [each.kwargs["exit_code"] for each in run.finish.call_args_list] == [1, 1]
    assert (run.mark_preempting.call_count, run.summary) == (1, {"outcome": "failed"})
    mlflow.create_run.assert_called_once()
    mlflow.update_run.assert_called_once_with("run0", status="RUNNING")
    ends = [each.kwargs["status"] for each in mlflow.set_terminated.call_args_list]
    assert ends == ["KILLED", "FAILED"]
    assert len(batches(mlflow, "params")) == sent


@pytest.mark.parametrize("call", ["init", "log"])
def test_failing_tracker_warns_once_and_is_dropped(
    tmp_path: Path, folder: RunFolder, wandb: Any, mlflow: Any, call: str
) -> None:
    failing = wandb.init if call == "init" else wandb.init.return_value.log
    failing.side_effect = ConnectionError("no route to the server\nmore")
    warnings = list[str]()
    track(folder, experiment_with(tmp_path, "wandb", "mlflow"), warnings.append)
    [warning] = warnings
    assert warning.startswith("tracking.trackers wandb: no route to the server; the run goes on ")
    mlflow.set_terminated.assert_called_once_with("run0", status="FINISHED")


def test_hanging_tracker_does_not_block_the_run(
    tmp_path: Path, folder: RunFolder, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    wandb.init.side_effect = lambda **options: release.wait(60)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    warnings = list[str]()
    track(folder, experiment_with(tmp_path, "wandb"), warnings.append)
    release.set()
    [warning] = warnings
    assert "wandb: has not sent everything in 0.05 s" in warning


def test_only_the_main_process_has_trackers(tmp_path: Path, folder: RunFolder, wandb: Any) -> None:
    reporter = Reporter(
        folder,
        experiment_with(tmp_path, "wandb"),
        ActivityTimer(),
        initial_step=0,
        is_main_process=False,
        quiet=True,
    )
    with reporter:
        reporter.log_training(1, {"loss": 1.0})
    wandb.init.assert_not_called()
    assert not folder.trackers.exists()


def test_missing_package_raises_before_training(
    tmp_path: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="mlflow: is not installed"):
        start(folder, experiment_with(tmp_path, "mlflow"), pytest.fail)


def test_damaged_ids_are_refused(tmp_path: Path, folder: RunFolder, wandb: Any) -> None:
    """A run of another id would be mistaken for the one that is resumed."""
    folder.trackers.write_text('{"wandb": "a')
    with pytest.raises(UserError, match=r"trackers.json: is not JSON .*; delete it, and each"):
        start(folder, experiment_with(tmp_path, "wandb"), pytest.fail)
    wandb.init.assert_not_called()


def test_invalid_settings_raise() -> None:
    with pytest.raises(UsageError, match="name each once"):
        TrackingConfig(("wandb", "wandb"))
    with pytest.raises(UsageError, match="is empty"):
        TrackingConfig(project="")
    with pytest.raises(UsageError, match=r"comet.*: is not known"):
        TrackingConfig(("comet",))  # type: ignore[arg-type]


def test_run_sends_the_contents_of_its_own_files(tmp_path: Path, wandb: Any) -> None:
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
    lines = logged(wandb)
    sent = [
        {name.partition("/")[2]: value for name, value in line.items() if "/" in name}
        for line in lines
        if "sample" not in line
    ]
    written = lines_of(workdir / "metrics.jsonl")
    for line in written:
        del line["step"], line["split"]
    assert sent == written
    assert [line["step"] for line in lines if "sample" in line] == [3]
    wandb.init.return_value.finish.assert_called_once_with(exit_code=0)
