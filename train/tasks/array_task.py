"""Base of tasks whose examples are arrays: numbers, or token ids without a tokenizer."""

import dataclasses
from typing import Any

import jax
import numpy as np

from train.data.arrays import (
    ArrayCorpus,
    ArrayDataConfig,
    ArrayEvaluationBatches,
    Arrays,
    ArrayTrainingBatches,
    check_arrays,
    num_examples,
    prepare_arrays,
    take_rows,
)
from train.data.held_data import PYTHON_DATA_PREFIX
from train.data.tokenizer import Tokenizer
from train.tasks.evaluation import EvaluationOptions
from train.tasks.task import Task, TrainingOptions
from train.tasks.vocabulary import Labels


@dataclasses.dataclass(frozen=True)
class ArrayTask(Task):
    """Task over arrays. A subclass has `read_arrays`, `make_model`, `make_loss_fn` and `predict`.

    `train.fit(experiment, data={"numbers": ..., "targets": ...})` gives it the arrays in place of
    `read_arrays`, which a task of such data alone does not need.

    A batch has rows of the arrays [B, ...], `examples` [B], and `weights` [B], which are 0 in rows
    that fill up the last batch of an evaluation. Evaluations report the mean of every loss.
    """

    data: ArrayDataConfig

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

    def training_batches(
        self, corpus: ArrayCorpus, options: TrainingOptions
    ) -> ArrayTrainingBatches:
        return ArrayTrainingBatches(corpus.split("train"), options.batch_size, options.seed)

    def describe_training_data(self, corpus: ArrayCorpus) -> str:
        return f"{num_examples(corpus.split('train')):,} examples"

    def evaluation_batches(
        self, corpus: ArrayCorpus, split: str, options: EvaluationOptions
    ) -> ArrayEvaluationBatches:
        return ArrayEvaluationBatches(corpus.split(split), options.batch_size, options.max_batches)

    def _arrays_of_split(self, split: str) -> Arrays | None:
        """Return the arrays that `train.fit` was given, or else those of `read_arrays`."""
        if self.data.path.startswith(PYTHON_DATA_PREFIX):
            held: Any = self.data.read_split(split)
            return held
        return self.read_arrays(split)
