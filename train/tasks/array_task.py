"""Base of tasks whose examples are arrays: numbers, or token ids without a tokenizer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.arrays import (
    ArrayCorpus,
    ArrayEvaluationBatches,
    Arrays,
    ArrayTrainingBatches,
    check_arrays,
    num_examples,
    prepare_arrays,
    take_rows,
)
from train.data.data_config import PYTHON_DATA_PREFIX
from train.evaluation.metrics import max_eval_batches, mean_losses, round_up_batch_size
from train.experiment import Experiment
from train.tasks.task import Task

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from train.engine import Engine
    from train.tasks.vocabulary import Labels


@dataclasses.dataclass(frozen=True)
class ArrayTask(Task):
    """Task over arrays. A subclass has `read_arrays`, `make_model`, `make_loss_fn` and `predict`.

    `train.fit(experiment, data={"numbers": ..., "targets": ...})` gives it the arrays in place of
    `read_arrays`, which a task of such data alone does not need.

    A batch has rows of the arrays [B, ...], `examples` [B], and `weights` [B], which are 0 in rows
    that fill up the last batch of an evaluation. Evaluations report the mean of every loss.
    """

    experiment: Experiment

    def read_arrays(self, split: str) -> Arrays | None:
        """Return the examples of a split: arrays by name, with one row for each example.

        They are the same in every call: a resumed run compares them. Estimates read those of
        training to learn the shapes of a batch.

        Args:
          split: "train", "validation" or "test".

        Returns:
          The arrays; None if there is no such split. Without a validation split, a tenth of the
          training examples is held out.
        """
        return None

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ArrayCorpus:
        return prepare_arrays(self._arrays_of_split)

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        arrays = check_arrays("train", self._arrays_of_split("train") or {})
        row = take_rows(arrays, np.zeros(1, np.int64))
        return {
            name: jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), array.dtype)
            for name, array in row.items()
        }

    def training_batches(self, corpus: ArrayCorpus) -> ArrayTrainingBatches:
        experiment = self.experiment
        return ArrayTrainingBatches(corpus.split("train"), experiment.batch_size, experiment.seed)

    def describe_training_data(self, corpus: ArrayCorpus) -> str:
        return f"{num_examples(corpus.split('train')):,} examples"

    def evaluate(
        self, engine: Engine, params: Any, corpus: ArrayCorpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the mean of every loss over a split, by name."""
        config = self.experiment.evaluation
        batch_size = round_up_batch_size(
            config.batch_size or self.experiment.batch_size, engine.mesh
        )
        batches = ArrayEvaluationBatches(
            corpus.split(split), batch_size, max_eval_batches(config, full_split)
        )
        return mean_losses(engine, params, batches)

    def _arrays_of_split(self, split: str) -> Arrays | None:
        """Return the arrays that `train.fit` was given, or else those of `read_arrays`."""
        data: Any = self.experiment.data
        if data.path.startswith(PYTHON_DATA_PREFIX):
            return data.read_split(split)
        return self.read_arrays(split)
