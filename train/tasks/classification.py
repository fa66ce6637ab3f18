"""What tasks whose answers are classes have in common: one for a text, or one for each word.

Classification: the class of each text.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from train.data.buckets import Bucket, bucket_by_rows
from train.data.example_configs import ExampleDataConfig, ListOpsDataConfig
from train.data.examples import (
    ExampleCorpus,
    ExampleEvaluationBatches,
    Examples,
    ExampleTrainingBatches,
)
from train.data.tokenizer import Tokenizer
from train.experiment import Experiment
from train.step import Batch, LossFn
from train.tasks.base import Task, max_eval_batches, round_up_batch_size
from train.tasks.config import Classification, Tagging
from train.tasks.losses import auxiliary_losses, label_loss, requested_outputs
from train.tasks.vocabulary import resolve_num_labels, resolve_vocab_size
from transformer.losses import Loss
from transformer.models.base import LOGITS

if TYPE_CHECKING:
    from train.engine import Engine
from collections.abc import Sequence

import numpy as np

from train.data.buckets import RaggedArray
from train.data.classification import ClassificationSplit, encode_texts, prepare_classification
from train.data.example_configs import ClassificationDataConfig
from train.data.listops import prepare_listops
from train.tasks.base import Metric, SampleOptions, TextCallback, mean_losses
from train.tasks.vocabulary import Labels
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware
from transformer.models.heads import Classifier

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class LabelPredictionTask(Task):
    """An encoder with a head, trained on examples that are padded to the lengths of buckets."""

    experiment: Experiment

    @property
    @abc.abstractmethod
    def data(self) -> ExampleDataConfig | ListOpsDataConfig:
        """Where the examples come from."""

    @property
    @abc.abstractmethod
    def task_config(self) -> Classification | Tagging:
        """Those of the task itself."""

    def resolve_experiment(self, corpus: ExampleCorpus[Any]) -> Experiment:
        experiment = resolve_vocab_size(self.experiment, corpus.tokenizer)
        return resolve_num_labels(experiment, self.task_config, corpus.labels)

    def make_loss_fn(self, model: Any) -> LossFn:
        """The cross entropy of the classes.

        A batch has `tokens` and `segments` [B, T]; `targets` and `weights` are [B] for texts, and
        [B, T] for words, at whose first pieces the weights are.
        """

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                segments=batch["segments"],
                dropout_rngs=dropout_rngs,
                outputs=LOGITS | requested_outputs(dropout_rngs),
            )
            assert output.logits is not None
            found = label_loss(model, output.logits, batch)
            return {**found, **auxiliary_losses(output.aux, found["loss"].weight)}

        return loss

    def training_batches(self, corpus: ExampleCorpus[Any]) -> ExampleTrainingBatches:
        split = corpus.split("train")
        buckets = self.make_buckets(split, self.experiment.batch_size)
        return ExampleTrainingBatches(split, buckets, seed=self.experiment.seed)

    def evaluation_batches(
        self, engine: Engine, examples: Examples, *, full_split: bool
    ) -> ExampleEvaluationBatches:
        """All of a split, or as much as an evaluation on the way takes."""
        settings = self.experiment.evaluation
        rows = round_up_batch_size(settings.batch_size or self.experiment.batch_size, engine.mesh)
        return ExampleEvaluationBatches(
            examples,
            self.make_buckets(examples, rows),
            max_batches=max_eval_batches(settings, full_split),
        )

    def make_buckets(self, examples: Examples, batch_size: int) -> tuple[Bucket, ...]:
        """By length, each with so many rows to a batch."""
        return bucket_by_rows(
            examples.lengths, batch_size=batch_size, max_buckets=self.data.max_buckets
        )

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        tokenizer.encode(prompt)


@functools.partial(jax.jit, static_argnames="model")
def predict_labels(
    params: Any,
    tokens: jax.Array,  # [B, T]
    segments: jax.Array,  # [B, T]
    *,
    model: Any,  # a Classifier or a Tagger
) -> jax.Array:  # [B] or [B, T]
    """The likeliest class of each text, or tag of each token."""
    logits = model.apply({"params": params}, tokens, segments=segments).logits
    return jnp.argmax(logits, axis=-1)


Corpus = ExampleCorpus[ClassificationSplit]


@dataclasses.dataclass(frozen=True)
class ClassificationTask(LabelPredictionTask):
    """A classifier of texts, judged by its accuracy."""

    @property
    def data(self) -> ClassificationDataConfig | ListOpsDataConfig:
        data = self.experiment.data
        assert isinstance(data, ClassificationDataConfig | ListOpsDataConfig)  # as has been checked
        return data

    @property
    def task_config(self) -> Classification:
        assert isinstance(self.experiment.task, Classification)
        return self.experiment.task

    def selection_metric(self, corpus: Corpus) -> Metric:
        return Metric("accuracy", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        data = self.data
        if isinstance(data, ListOpsDataConfig):
            return prepare_listops(data, tokenizer, labels or None)
        return prepare_classification(data, tokenizer, labels or None)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Classifier:
        settings = self.task_config
        return Classifier(
            self.experiment.model,
            hardware,
            constrain,
            num_classes=settings.num_labels,
            pooling=settings.pooling,
            head_dropout=settings.classifier_dropout,
        )

    def describe_training_data(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').tokens):,} texts of {len(corpus.labels)} classes"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Loss in nats a text, and accuracy."""
        return mean_losses(
            engine,
            params,
            self.evaluation_batches(engine, corpus.split(split), full_split=full_split),
        )

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """The likeliest class of each prompt."""
        length = self.data.max_length
        texts = RaggedArray.from_sequences(
            [text[:length] for text in encode_texts(run.tokenizer, prompts)]
        )
        found = []
        for number in range(len(prompts)):
            tokens, real = texts.pad(np.array([number]), length)
            segments = real.astype(np.int32)
            best = predict_labels(run.params, tokens, segments, model=run.model)
            found.append(run.labels[int(best[0])])
        if on_text is not None:
            on_text("".join(found))
        return found
