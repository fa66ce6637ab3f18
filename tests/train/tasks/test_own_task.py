"""A task defined outside the package: registered by one call, then trained like any other."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from tests.train.support import NO_DETECTOR, command, lines_of, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.config.io import experiment_from_dict, experiment_to_dict, experiment_to_text
from train.data.batches import TrainingBatches
from train.data.data_config import DataConfig, TokenizerConfig
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.estimate.batch_shapes import unsharded_batch_shapes
from train.experiment import EvaluationConfig
from train.run import Run
from train.step import Batch, LossFn
from train.tasks.evaluation import EvaluationOptions
from train.tasks.registry import TASKS, register_task
from train.tasks.task import Metric, Task, TaskConfig, TrainedModel, TrainingOptions
from train.tasks.vocabulary import Labels
from transformer.losses import Loss, label_loss
from transformer.models.config import TransformerConfig
from transformer.models.heads import Classifier

LABELS = ("fewer", "more")


@dataclasses.dataclass(frozen=True)
class RandomBits(DataConfig):
    """Random sequences of bits; there is nothing to read."""

    path: str = ""
    num_bits: int = 7
    tokenizer: TokenizerConfig = TokenizerConfig("character")

    @property
    def longest_example(self) -> int:
        return self.num_bits


@dataclasses.dataclass(frozen=True)
class Majority(TaskConfig):
    """Predict if a sequence has more ones than zeros."""

    data_configs = (RandomBits,)

    def check(self, model: TransformerConfig) -> None:
        assert not model.causal


@dataclasses.dataclass(frozen=True)
class BitBatches(TrainingBatches):
    """Batches as a pure function of seed and cursor."""

    shape: tuple[int, int]
    seed: int
    num_batches: int = 0

    def __len__(self) -> int:
        return self.num_batches

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        rows = self.shape[0] // num_hosts
        bits = np.random.default_rng((self.seed, cursor)).integers(2, size=self.shape)
        mine = bits[host * rows : (host + 1) * rows]
        return {
            "tokens": mine.astype(np.int32),
            "targets": (2 * mine.sum(axis=1) > self.shape[1]).astype(np.int32),
            "weights": np.ones(rows, np.float32),
            "examples": np.arange(rows, dtype=np.uint32),
        }


@dataclasses.dataclass(frozen=True)
class BitCorpus:
    tokenizer: Tokenizer
    digest: str = "bits"
    labels: Labels = LABELS
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class MajorityTask(Task):
    """The whole task: data, model, loss, evaluation and answers."""

    data: RandomBits

    def selection_metric(self, corpus: Any) -> Metric:
        return Metric("accuracy", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> BitCorpus:
        return BitCorpus(tokenizer or train_tokenizer(self.data.tokenizer, ["01"]))

    def make_model(self, hardware: Any, constrain: Any) -> Classifier:
        return Classifier(self.model_config, hardware, constrain, num_classes=2, pooling="mean")

    def make_loss_fn(self, model: Any) -> LossFn:
        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply({"params": params}, batch["tokens"], dropout_rngs=dropout_rngs)
            return label_loss(model, output.logits, batch)

        return loss

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        batch = BitBatches((batch_size, length), 0).host_batch(0, 0, 1)
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}

    def training_batches(self, corpus: Any, options: TrainingOptions) -> BitBatches:
        return BitBatches((options.batch_size, self.data.num_bits), options.seed)

    def evaluation_batches(self, corpus: Any, split: str, options: EvaluationOptions) -> BitBatches:
        return BitBatches((options.batch_size, self.data.num_bits), 1000, num_batches=3)

    def predict(self, run: TrainedModel, prompt: str) -> str:
        assert run.tokenizer is not None
        tokens = run.tokenizer.encode(prompt)[None]
        forward = jax.jit(lambda params: run.model.apply({"params": params}, tokens).logits)
        logits = forward(run.params)
        return LABELS[int(np.argmax(np.asarray(logits)))]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register_task(Majority)(MajorityTask)
    yield
    del TASKS["Majority"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("own")
    experiment = tiny(folder, num_layers=1, dropout=0.0, recovery=NO_DETECTOR)
    experiment = dataclasses.replace(
        experiment,
        task=Majority(),
        data=RandomBits(),
        model=dataclasses.replace(experiment.model, causal=False),
        evaluation=EvaluationConfig(every=0),
        steps=40,
        batch_size=32,
    )
    return folder / "run", train.fit(experiment, str(folder / "run"), quiet=True)


def test_own_task_is_trained_and_evaluated(trained: tuple[Path, Run]) -> None:
    folder, run = trained
    assert run.final_metrics["accuracy"] > 0.85
    last = lines_of(folder / "metrics.jsonl")[-1]
    assert last == {"step": 40, "split": "validation", **run.final_metrics}


def test_own_task_is_saved_and_loaded_by_kind(trained: tuple[Path, Run]) -> None:
    folder, run = trained
    text = experiment_to_text(run.experiment)
    assert 'task.kind = "Majority"' in text
    assert 'data.kind = "RandomBits"' in text
    assert experiment_from_dict(experiment_to_dict(run.experiment), "test") == run.experiment
    loaded = train.load(str(folder))
    assert loaded.labels == LABELS
    assert loaded.generate(["1111111", "0000000"]) == ["more", "fewer"]


def test_own_task_on_the_command_line(
    trained: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = trained
    result = command(capsys, "evaluate", str(folder), "--json")
    assert (result.status, result.error) == (0, "")
    assert json.loads(result.output)["accuracy"] == pytest.approx(run.final_metrics["accuracy"])


def test_own_task_can_be_estimated(trained: tuple[Path, Run]) -> None:
    shapes = unsharded_batch_shapes(trained[1].experiment, 4)
    assert {name: leaf.shape for name, leaf in shapes.items()} == {
        "tokens": (4, 7),
        "targets": (4,),
        "weights": (4,),
        "examples": (4,),
    }
