import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from configs.digits import EXPERIMENTS
from tests.train.resumed_runs import preempted_after
from tests.train.support import NO_DETECTOR, assert_same_bits, command, resolved
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine, make_task, with_python_data
from train.data.features import FeatureDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.runtime.local_hardware import local_hardware
from train.tasks.feature_classification import FeatureClassification

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
        "recovery": NO_DETECTOR,
    }
    return dataclasses.replace(base, **{**settings, **changes})


@pytest.mark.full
def test_images_train_resume_and_predict_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    """Sizes follow from the data; a resumed run has the same weights; `sample` reads files."""
    uninterrupted = train.fit(tiny(), tmp_path / "uninterrupted", data=DATA, quiet=True)
    task = uninterrupted.experiment.task
    assert isinstance(task, FeatureClassification)
    assert (task.num_labels, task.num_features) == (2, 1)
    assert set(uninterrupted.final_metrics) == {"loss", "accuracy"}
    with preempted_after(8):
        train.fit(tiny(), tmp_path / "resumed", data=DATA, quiet=True)
    resumed = train.fit(tiny(), tmp_path / "resumed", data=DATA, quiet=True)
    assert_same_bits(uninterrupted.params, resumed.params)
    with pytest.raises(train.UserError, match=r"^data: has label 2, and the model's 2 classes are"):
        resumed.evaluate(data={**DATA, "labels": DATA["labels"] + 1})

    file, new = tmp_path / "mine.npz", tmp_path / "new.npz"
    np.savez(file, **DATA)
    np.savez(new, images=DATA["images"][:3])
    workdir = str(tmp_path / "file")
    arguments = ["digits", "--data.path", str(file), "--data.patch-size", "1", "--data.length", "4"]
    arguments += ["--model.d-model", "8", "--model.num-layers", "1", "--data.scale", "1"]
    arguments += ["--steps", "2", "--batch-size", "8"]
    assert command(capsys, "fit", *arguments, "--workdir", workdir).status == 0
    result = command(capsys, "sample", workdir, "--prompt", str(new), "--json")
    [text] = json.loads(result.output)["text"]
    assert set(text.split()) <= {"0", "1"}
    assert len(text.split()) == 3
    missing = command(capsys, "sample", workdir, "--prompt", str(tmp_path / "none.npz"))
    assert missing.status == 1
    assert "does not exist" in missing.error


@pytest.mark.parametrize(
    "name", ["digits:graphs", pytest.param("digits:chirps", marks=pytest.mark.full)]
)
def test_verbs_describe_data_without_text(capsys: Capture, name: str) -> None:
    """Features and classes are counted in the data, and there is no vocabulary."""
    data = command(capsys, "data", name)
    assert (data.status, data.error) == (0, "")
    assert "vocabulary" not in data.output
    described = command(capsys, "describe", name, "--json")
    assert described.status == 0, described.error
    sizes = json.loads(described.output)["parameters"]
    experiment = EXPERIMENTS[name.partition(":")[2]]
    engine = make_engine(resolved(experiment), local_hardware())
    params = jax.tree.leaves(engine.abstract_state().params)
    assert sizes["total"] + sizes["heads"] == sum(leaf.size for leaf in params)


def test_sizes_that_are_given_are_not_read_from_the_data(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["describe", "digits:chirps", "--data.path", str(tmp_path / "none.npz"), "--json"]
    missing = command(capsys, *arguments)
    assert missing.status == 1
    assert "or give --task.num-labels and --task.num-features" in missing.error
    sizes = ["--task.num-labels", "3", "--task.num-features", "65"]
    given = command(capsys, *arguments, *sizes)
    assert given.status == 0, given.error
    whole = command(capsys, "describe", "digits:chirps", "--json")
    totals = [json.loads(each.output)["parameters"]["total"] for each in (given, whole)]
    assert totals[0] == totals[1]


@pytest.mark.full
def test_plan_of_features(capsys: Capture) -> None:
    planned = command(
        capsys, "plan", "digits:chirps", "--target", "h100:1", "--compile-best", "0", "--json"
    )
    assert planned.status == 0, planned.error
    assert json.loads(planned.output)


@pytest.mark.nightly
def test_accuracy_on_graphs_needs_the_edges(tmp_path: Path) -> None:
    """A model that attends along edges classifies paths; one without edges guesses."""
    accuracy = {}
    for name in ("graphs", "blind"):
        checkpoint = CheckpointConfig(every=0)
        experiment = dataclasses.replace(
            EXPERIMENTS[name], evaluation=EvaluationConfig(every=0), checkpoint=checkpoint
        )
        run = train.fit(experiment, tmp_path / name, quiet=True)
        accuracy[name] = run.evaluate("test")["accuracy"]
    assert accuracy["graphs"] > 0.9 > 0.6 > accuracy["blind"], accuracy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 1}, r"task\.num_labels 1: the data have 2"),
        ({"num_features": 5}, r"task\.num_features 5: the data have 1"),
    ],
)
def test_sizes_that_differ_from_the_data_raise(settings: Any, message: str) -> None:
    experiment, held_data = with_python_data(tiny(task=FeatureClassification(**settings)), DATA)
    task = make_task(experiment)
    corpus = task.prepare_corpus()
    with pytest.raises(train.UserError, match=message):
        task.resolve(corpus)
    assert held_data.path == experiment.data.path


VECTORS: dict[str, Any] = {"features": PATCHES.reshape(80, 4, 4), "labels": DATA["labels"]}

GRAPHS: dict[str, Any] = {**VECTORS, "adjacency": np.ones((80, 4, 4), bool)}


def resolve(data: Any, **settings: Any) -> Experiment:
    experiment, _held = with_python_data(tiny(task=FeatureClassification(**settings)), data)
    return resolved(experiment)


@pytest.mark.parametrize(
    ("training", "given", "message"),
    [
        (GRAPHS, VECTORS, "has no adjacency"),
        (VECTORS, GRAPHS, "has an adjacency"),
        (VECTORS, {**VECTORS, "labels": VECTORS["labels"] + 1}, "has label 2"),
        (VECTORS, DATA, "has 1 numbers at each position, and the model reads 4"),
    ],
    ids=["no edges", "edges", "labels", "width"],
)
def test_examples_of_another_kind_raise(
    training: Any, given: Any, message: str, tmp_path: Path
) -> None:
    """In an evaluation of other data, and in a prediction; the training's own data pass."""
    experiment = resolve(training)
    assert experiment.task.has_adjacency == ("adjacency" in training)  # type: ignore[attr-defined]
    for data in (training, given):
        held_experiment, _held = with_python_data(experiment, {"train": data, "validation": data})
        task = make_task(held_experiment)
        if data is training:
            assert task.resolve(task.prepare_corpus()).config == experiment.task
            continue
        with pytest.raises(train.UserError, match=f"^data: {message}"):
            task.prepare_corpus()
        file = tmp_path / "new.npz"
        np.savez(file, **given)
        with pytest.raises(train.UserError, match=f"new.npz: {message}"):
            make_task(experiment).predict(None, str(file))  # type: ignore[arg-type]


def test_splits_with_and_without_edges_raise() -> None:
    with pytest.raises(train.UserError, match=r"^the test split: has an adjacency"):
        resolve({"train": VECTORS, "test": GRAPHS})
    ignoring = resolve({"train": VECTORS, "test": GRAPHS}, use_adjacency=False)
    held_experiment, _held = with_python_data(ignoring, {"train": GRAPHS, "validation": GRAPHS})
    make_task(held_experiment).prepare_corpus()


def test_classes_are_counted_in_all_splits() -> None:
    experiment = resolve({"train": VECTORS, "test": {**VECTORS, "labels": VECTORS["labels"] + 2}})
    assert experiment.task.num_labels == 4


def test_first_position_of_a_causal_model_raises() -> None:
    model = dataclasses.replace(tiny().model, causal=True)
    with pytest.raises(train.UserError, match=r"task\.pooling first: the first position of a"):
        tiny(model=model, task=FeatureClassification(pooling="first"))
