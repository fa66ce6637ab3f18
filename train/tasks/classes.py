"""What tasks whose answers are classes have in common: one for a text, or one for each word."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from train.data.buckets import Bucket, bucket_by_rows
from train.data.example_batches import ExampleEvaluationBatches, Examples, ExampleTrainingBatches
from train.data.example_config import ExampleDataConfig
from train.data.example_corpus import ExampleCorpus
from train.data.listops_config import ListOpsDataConfig
from train.data.tokenizer import Tokenizer
from train.experiment import Experiment
from train.step import Batch, LossFn
from train.tasks.config import Classification, Tagging
from train.tasks.losses import auxiliary_losses, label_loss, requested_outputs
from train.tasks.measuring import max_eval_batches, round_up_batch_size
from train.tasks.task import Task
from train.tasks.vocabulary import resolve_num_labels, resolve_vocab_size
from transformer.losses import Loss
from transformer.model import LOGITS

if TYPE_CHECKING:
    from train.engine import Engine


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
