"""Parts that the tasks over windows of text share: corpus, windows and shapes."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from train.data.batches import (
    TextEvaluationBatches,
    TextTrainingBatches,
    make_text_evaluation_batches,
)
from train.data.corpus import TextCorpus
from train.data.data_config import TextDataConfig
from train.data.mixed_corpora import MixedCorpus, combine_metrics
from train.data.source_mixing import MixedBatches
from train.evaluation.metrics import max_eval_batches, round_up_batch_size
from train.experiment import Experiment
from train.tasks.task import Task, token_batch_shapes

if TYPE_CHECKING:
    from train.engine import Engine

AnyTextCorpus = TextCorpus | MixedCorpus
"""One source of running text, or several."""

TextBatches = TextTrainingBatches | MixedBatches
"""Windows of one source of running text, or of several."""


@dataclasses.dataclass(frozen=True)
class TextTask(Task):
    """Task over windows of text. The best checkpoint is the one with the lowest loss.

    Subclasses define `evaluate_source`: the metrics of one source.
    """

    experiment: Experiment

    @property
    def data(self) -> TextDataConfig:
        return self.experiment.text_data

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def describe_training_data(self, corpus: AnyTextCorpus) -> str:
        if isinstance(corpus, MixedCorpus):
            return corpus.describe()
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def evaluate(
        self, engine: Engine, params: Any, corpus: AnyTextCorpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the metrics of a split, of the mixture and of each source if there are several."""
        if not isinstance(corpus, MixedCorpus):
            return self.evaluate_source(engine, params, corpus, split, full_split=full_split)
        parts = corpus.parts(split)
        metrics = {
            source.name: self.evaluate_source(
                engine, params, source.corpus, split, full_split=full_split
            )
            for source, _ in parts
        }
        if len(corpus.sources) == 1:
            return metrics[parts[0][0].name]
        return combine_metrics(metrics, {source.name: share for source, share in parts})

    @abc.abstractmethod
    def evaluate_source(
        self, engine: Engine, params: Any, corpus: TextCorpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the metrics of a split of one source. See `Task.evaluate`."""

    def training_windows(self, corpus: AnyTextCorpus) -> TextBatches:
        """Return batches of windows of the training split, shuffled by the seed."""
        if isinstance(corpus, MixedCorpus):
            return corpus.training_batches(
                self.data,
                batch_size=self.experiment.batch_size,
                seed=self.experiment.seed,
                steps=self.experiment.steps,
            )
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
