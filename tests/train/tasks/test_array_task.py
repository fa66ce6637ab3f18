import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from tests.train.support import NO_DETECTOR, assert_same_bits, losses
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_task, with_python_data
from train.data.arrays import ArrayDataConfig
from train.experiment import Experiment
from train.tasks.array_task import ArrayTask
from train.tasks.registry import TASKS, TaskEntry, register_task
from train.tasks.task import TaskConfig
from transformer import Classifier, TransformerConfig
from transformer.losses import label_loss

MODEL = TransformerConfig(vocab_size=5, d_model=8, num_layers=1, causal=False)

TOKENS = np.random.default_rng(0).integers(5, size=(40, 6))

DATA = {"tokens": TOKENS, "targets": (TOKENS[:, 0] > 2).astype(np.int64)}


@dataclasses.dataclass(frozen=True)
class FirstIsLarge(TaskConfig):
    """Predict whether the first symbol is 3 or 4."""


class FirstIsLargeTask(ArrayTask):
    def make_model(self, hardware: Any, constrain: Any) -> Any:
        return Classifier(self.model_config, hardware, constrain, num_classes=2)

    def make_loss_fn(self, model: Any) -> Any:
        def compute(params: Any, batch: Any, dropout_rngs: Any) -> Any:
            logits = model.apply({"params": params}, batch["tokens"]).logits
            return label_loss(model, logits, batch)

        return compute


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_task(FirstIsLarge)(FirstIsLargeTask)
    yield
    del TASKS["FirstIsLarge"]


def experiment(steps: int = 6) -> Experiment:
    data = ArrayDataConfig(length=6)
    settings: dict[str, Any] = {"batch_size": 8, "log_every": 1, "recovery": NO_DETECTOR}
    return Experiment("first", FirstIsLarge(), MODEL, data, steps=steps, **settings)


def evaluated_loss(run: train.Run, data: Any, split: str = "validation") -> float:
    return run.evaluate(split, data=data)["loss"]


@pytest.mark.full
def test_arrays_train_evaluate_and_resume(tmp_path: Path) -> None:
    """Arrays train a model, other arrays are evaluated, and only the same ones resume it."""
    uninterrupted = train.fit(experiment(), tmp_path / "whole", data=DATA, quiet=True)
    train.fit(experiment(3), tmp_path / "parts", data=DATA, quiet=True)
    resumed = train.fit(experiment(), tmp_path / "parts", data=DATA, quiet=True)
    assert_same_bits(uninterrupted.params, resumed.params)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")

    other = DATA | {"targets": 1 - DATA["targets"]}
    with pytest.raises(train.UserError, match=r"was trained on data given from Python, python:dat"):
        train.fit(experiment(9), tmp_path / "parts", data=other, quiet=True)
    with pytest.raises(
        train.UserError, match=r"and now none are given; call train.fit with the sa"
    ):
        train.fit(experiment(9), tmp_path / "parts", quiet=True)

    loaded = train.load(tmp_path / "whole")
    assert evaluated_loss(loaded, DATA) != evaluated_loss(loaded, other)
    assert evaluated_loss(loaded, {"test": other}, "test") == evaluated_loss(loaded, other)
    with pytest.raises(train.UserError, match="split 'dev': data has only test; choose one"):
        loaded.evaluate("dev", data={"test": other})


def test_data_path_is_a_digest_of_the_arrays() -> None:
    """The digest depends on names, types, shapes and values, not on the order of the names."""
    others: tuple[Any, ...] = (
        DATA | {"targets": 1 - DATA["targets"]},
        DATA | {"tokens": TOKENS.astype(np.float32)},
        DATA | {"tokens": TOKENS[:, ::-1]},
        {name: array[1:] for name, array in DATA.items()},
        {"train": DATA, "validation": DATA},
    )
    results = [with_python_data(experiment(), data) for data in (DATA, *others)]
    paths = [changed.data.path for changed, _ in results]
    assert len(set(paths)) == 6
    assert with_python_data(experiment(), dict(reversed(DATA.items())))[0].data.path == paths[0]
    task = make_task(results[-1][0])
    corpus: Any = task.prepare_corpus()
    sizes = {name: len(arrays["tokens"]) for name, arrays in corpus.splits.items()}
    assert sizes == {"train": 40, "validation": 40}
    shapes = {name: x.shape for name, x in task.batch_shapes(3, 6).items()}
    assert shapes == {"tokens": (3, 6), "targets": (3,), "weights": (3,), "examples": (3,)}


def test_arrays_are_copied() -> None:
    """A change in place is another data set, and does not reach the one that is held."""
    data = {name: array.copy() for name, array in DATA.items()}
    changed, held_data = with_python_data(experiment(), data)
    data["targets"][:] = 0
    assert held_data.splits["train"]["targets"].sum() == DATA["targets"].sum() > 0
    assert with_python_data(experiment(), data)[0].data.path != changed.data.path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TOKENS, "data, split train: is a ndarray; give a dict of the arrays"),
        ((TOKENS, TOKENS), "data, split train: is a tuple"),
        ({}, "the train split: has no examples"),
        ({"tokens": [[1, 2], [3]]}, "array tokens has rows of several lengths"),
        ({"train": DATA, "dev": DATA}, "data: split 'dev' is not known"),
        ({"validation": DATA}, "data: has no split train"),
        ({"train": DATA, "validation": TOKENS}, "data, split validation: is a ndarray"),
    ],
)
def test_invalid_data_raise(data: Any, message: str) -> None:
    with pytest.raises(train.UserError, match=message):
        with_python_data(experiment(), data)


def test_missing_array_of_a_split_raises_before_training() -> None:
    changed, held_data = with_python_data(experiment(), DATA, {"tokens": TOKENS})
    with pytest.raises(train.UserError, match="the validation split: has no array targets, which"):
        make_task(changed).prepare_corpus()
    assert held_data.splits["validation"].keys() == {"tokens"}


def test_task_without_data_raises() -> None:
    with pytest.raises(train.UserError, match=r"give them to train.fit as data"):
        make_task(experiment()).prepare_corpus()


def test_data_for_a_task_that_reads_its_own_raise() -> None:
    """The task would ignore them."""
    TASKS["FirstIsLarge"] = TaskEntry(FirstIsLarge, lambda *_: object())  # type: ignore[arg-type]
    with pytest.raises(train.UserError, match="data: the task FirstIsLarge reads its own; derive"):
        with_python_data(experiment(), DATA)
