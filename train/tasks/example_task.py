"""Base of tasks over examples of several lengths: texts, sentences, pairs, conversations."""

import dataclasses
from typing import Any

import jax

from train.data.buckets import Bucket, bucket_by_rows
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    ExampleEvaluationBatches,
    Examples,
    ExampleTrainingBatches,
)
from train.tasks.evaluation import EvaluationOptions
from train.tasks.task import Task, TrainingOptions, token_batch_shapes


@dataclasses.dataclass(frozen=True)
class ExampleTask(Task):
    """Task over examples, which are grouped by length into buckets and padded to their bucket's."""

    data: ExampleDataConfig

    def make_buckets(
        self, examples: Examples, batch_size: int, row_multiple: int
    ) -> tuple[Bucket, ...]:
        """Return buckets by length, each with batches of `batch_size` rows."""
        return bucket_by_rows(
            examples.lengths, batch_size=batch_size, max_buckets=self.data.max_buckets
        )

    def training_batches(
        self, corpus: ExampleCorpus[Any], options: TrainingOptions
    ) -> ExampleTrainingBatches:
        split = corpus.split("train")
        buckets = self.make_buckets(split, options.batch_size, self.data.batch_size_multiple)
        return ExampleTrainingBatches(split, buckets, seed=options.seed)

    def evaluation_batches(
        self, corpus: ExampleCorpus[Any], split: str, options: EvaluationOptions
    ) -> ExampleEvaluationBatches:
        examples = corpus.split(split)
        buckets = self.make_buckets(examples, options.batch_size, options.row_multiple)
        return ExampleEvaluationBatches(examples, buckets, max_batches=options.max_batches)

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)
