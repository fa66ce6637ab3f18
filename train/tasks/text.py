"""Parts that the tasks over windows of text share: corpus, windows and shapes."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from train.data.batches import (
    TextEvaluationBatches,
    TextTrainingBatches,
    make_text_evaluation_batches,
)
from train.data.config import TextDataConfig
from train.data.corpus import TextCorpus
from train.evaluation.metrics import max_eval_batches, round_up_batch_size
from train.experiment import Experiment
from train.tasks.base import Task, token_batch_shapes


@dataclasses.dataclass(frozen=True)
class TextTask(Task):
    """Task over windows of text. The best checkpoint is the one with the lowest loss."""

    experiment: Experiment

    @property
    def data(self) -> TextDataConfig:
        return self.experiment.text_data

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def describe_training_data(self, corpus: TextCorpus) -> str:
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def training_windows(self, corpus: TextCorpus) -> TextTrainingBatches:
        """Return batches of windows of the training split, shuffled by the seed."""
        return TextTrainingBatches(
            corpus.split("train"),
            batch_size=self.experiment.batch_size,
            sequence_length=self.data.sequence_length,
            seed=self.experiment.seed,
            document_masking=self.data.document_masking,
        )

    def evaluation_windows(
        self, corpus: TextCorpus, split: str, mesh: Mesh, *, full_split: bool, stride: int = 0
    ) -> TextEvaluationBatches:
        """Return batches of windows of a split, in order.

        Args:
          corpus: The texts.
          split: "train", "validation" or "test".
          mesh: Devices, to whose number batches are rounded up.
          full_split: Return all windows, and not only `evaluation.num_batches` batches.
          stride: Tokens between the starts of two windows; 0: the length of a window.
        """
        config = self.experiment.evaluation
        batch_size = config.batch_size or self.experiment.batch_size
        return make_text_evaluation_batches(
            corpus.split(split),
            batch_size=round_up_batch_size(batch_size, mesh),
            sequence_length=self.data.sequence_length,
            stride=stride or None,
            document_masking=self.data.document_masking,
            max_batches=max_eval_batches(config, full_split),
        )
