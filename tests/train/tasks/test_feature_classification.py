"""Classification of images, sound and graphs: sizes from the data, complete runs, use of edges."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from configs.digits import EXPERIMENTS
from tests.train.support import assert_same_bits, command
from tests.train.support import light_compiler as light_compiler
from train.data.example_configs import FeatureDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.tasks.task_configs import FeatureClassification
from train.tasks.task_registry import make_task

Capture = pytest.CaptureFixture[str]

RANDOM = np.random.default_rng(0)

PATCHES = RANDOM.normal(size=(80, 4, 2, 2)).astype(np.float32)

DATA: dict[str, Any] = {
    "images": PATCHES[:, 0],
    "labels": (PATCHES[:, 0, 0, 0] > 0).astype(np.int64),
}


def tiny(**changes: Any) -> Experiment:
    base = EXPERIMENTS["digits"]
    model = dataclasses.replace(base.model, d_model=8, num_layers=1)
    settings: dict[str, Any] = {
        "model": model,
        "data": FeatureDataConfig(patch_size=1, length=4),
        "steps": 12,
        "batch_size": 8,
        "evaluation": EvaluationConfig(every=6),
        "checkpoint": CheckpointConfig(every=6),
        "log_every": 4,
    }
    return dataclasses.replace(base, **{**settings, **changes})


@pytest.mark.slow
def test_images_train_resume_and_predict_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    """Sizes follow from the data; a resumed run has the same weights; `sample` reads files."""
    uninterrupted = train.fit(tiny(), tmp_path / "uninterrupted", data=DATA, quiet=True)
    task = uninterrupted.experiment.task
    assert isinstance(task, FeatureClassification)
    assert (task.num_labels, task.num_features) == (2, 1)
    assert set(uninterrupted.final_metrics) == {"loss", "accuracy"}
    train.fit(tiny(steps=6), tmp_path / "resumed", data=DATA, quiet=True)
    resumed = train.fit(tiny(), tmp_path / "resumed", data=DATA, quiet=True)
    assert_same_bits(uninterrupted.params, resumed.params)

    file, new = tmp_path / "mine.npz", tmp_path / "new.npz"
    np.savez(file, **DATA)
    np.savez(new, images=DATA["images"][:3])
    workdir = str(tmp_path / "file")
    arguments = ["digits", "--data.path", str(file), "--data.patch-size", "1", "--data.length", "4"]
    arguments += ["--model.d-model", "8", "--steps", "2", "--batch-size", "8", "--data.scale", "1"]
    assert command(capsys, "fit", *arguments, "--workdir", workdir).status == 0
    result = command(capsys, "sample", workdir, "--prompt", str(new), "--json")
    [text] = json.loads(result.output)["text"]
    assert set(text.split()) <= {"0", "1"}
    assert len(text.split()) == 3
    missing = command(capsys, "sample", workdir, "--prompt", str(tmp_path / "none.npz"))
    assert missing.status == 1
    assert "there is no such file" in missing.error


@pytest.mark.slow
def test_accuracy_on_graphs_needs_the_edges(tmp_path: Path) -> None:
    """A model that attends along edges classifies paths; one without edges guesses."""
    accuracy = {}
    for name in ("graphs", "blind"):
        base = EXPERIMENTS[name]
        experiment = dataclasses.replace(
            base,
            model=dataclasses.replace(base.model, d_model=32),
            steps=250,
            schedule=dataclasses.replace(base.schedule, learning_rate=3e-3, warmup_steps=20),  # type: ignore[call-arg]
            evaluation=EvaluationConfig(every=0),
            checkpoint=CheckpointConfig(every=250),
        )
        run = train.fit(experiment, tmp_path / name, quiet=True)
        accuracy[name] = run.evaluate("test")["accuracy"]
    assert accuracy["graphs"] > 0.8 > 0.6 > accuracy["blind"], accuracy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 1}, r"task\.num_labels 1: the data have 2; leave it out"),
        ({"num_features": 5}, r"task\.num_features 5: the data have 1; leave it out"),
    ],
)
def test_sizes_that_differ_from_the_data_raise(settings: Any, message: str) -> None:
    from train.data.python_data import hold_data

    experiment, held_data = hold_data(tiny(task=FeatureClassification(**settings)), DATA)
    task = make_task(experiment)
    corpus = task.prepare_corpus()
    with pytest.raises(train.UserError, match=message):
        task.resolve_experiment(corpus)
    assert held_data.path == experiment.data.path
