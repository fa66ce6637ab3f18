"""Parts that the tasks over windows of text share: corpus, windows and shapes."""

import abc
import dataclasses

import jax

from train.data.batches import TextEvaluationBatches, TextTrainingBatches, TrainingBatches
from train.data.corpus import TextCorpus
from train.data.data_config import TextDataConfig
from train.data.mixed_corpora import MixedCorpus, combine_metrics
from train.tasks.evaluation import EvaluatedModel, EvaluationBatches, EvaluationOptions
from train.tasks.task import Task, TrainingOptions, token_batch_shapes

AnyTextCorpus = TextCorpus | MixedCorpus
"""One source of running text, or several."""


@dataclasses.dataclass(frozen=True)
class TextTask(Task):
    """Task over windows of text. The best checkpoint is the one with the lowest loss.

    Subclasses define `evaluate_source`: the metrics of one source.
    """

    data: TextDataConfig

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def describe_training_data(self, corpus: AnyTextCorpus) -> str:
        if isinstance(corpus, MixedCorpus):
            return corpus.describe()
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def training_batches(self, corpus: AnyTextCorpus, options: TrainingOptions) -> TrainingBatches:
        """Return batches of windows of the training split, shuffled by the seed."""
        if isinstance(corpus, MixedCorpus):
            return corpus.training_batches(
                self.data,
                batch_size=options.batch_size,
                seed=options.seed,
                steps=options.steps,
            )
        return TextTrainingBatches(
            corpus.split("train"),
            batch_size=options.batch_size,
            sequence_length=self.data.sequence_length,
            seed=options.seed,
            document_masking=self.data.document_masking,
        )

    def evaluation_batches(
        self, corpus: TextCorpus, split: str, options: EvaluationOptions
    ) -> EvaluationBatches:
        """Return the windows of one source, in order."""
        return self.evaluation_windows(corpus, split, options)

    def evaluation_windows(
        self, corpus: TextCorpus, split: str, options: EvaluationOptions
    ) -> TextEvaluationBatches:
        """Return batches of windows of a split, in order."""
        return TextEvaluationBatches(
            corpus.split(split),
            batch_size=options.batch_size,
            sequence_length=self.data.sequence_length,
            stride=options.stride or None,
            document_masking=self.data.document_masking,
            max_batches=options.max_batches,
        )

    def evaluate(
        self,
        model: EvaluatedModel,
        corpus: AnyTextCorpus,
        split: str,
        options: EvaluationOptions,
    ) -> dict[str, float]:
        """Return the metrics of a split, of the mixture and of each source if there are several."""
        if not isinstance(corpus, MixedCorpus):
            return self.evaluate_source(model, corpus, split, options)
        parts = corpus.parts(split)
        metrics = {
            source.name: self.evaluate_source(model, source.corpus, split, options)
            for source, _ in parts
        }
        if len(corpus.sources) == 1:
            return metrics[parts[0][0].name]
        return combine_metrics(metrics, {source.name: share for source, share in parts})

    @abc.abstractmethod
    def evaluate_source(
        self, model: EvaluatedModel, corpus: TextCorpus, split: str, options: EvaluationOptions
    ) -> dict[str, float]:
        """Return the metrics of a split of one source. See `Task.evaluate`."""
