"""What tasks whose answers are classes have in common: one for a text, or one for each word."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from train.data.buckets import Bucket, buckets_by_rows
from train.data.example_batches import Examples, HeldOutBatches, TrainingBatches
from train.data.example_config import ExampleDataConfig
from train.data.example_corpus import ExampleCorpus
from train.data.listops_config import ListOpsDataConfig
from train.data.tokenizer import Tokenizer
from train.experiment import Experiment
from train.step import Batch, LossFunction
from train.tasks.config import Classification, Tagging
from train.tasks.losses import auxiliary, class_loss, wanted
from train.tasks.measuring import fitting, limit
from train.tasks.task import Task
from train.tasks.vocabulary import with_classes, with_vocabulary
from transformer.losses import Loss
from transformer.model import LOGITS

if TYPE_CHECKING:
    from train.engine import Engine


@dataclasses.dataclass(frozen=True)
class ClassesTask(Task):
    """An encoder with a head, trained on examples that are padded to the lengths of buckets."""

    experiment: Experiment

    @property
    @abc.abstractmethod
    def data(self) -> ExampleDataConfig | ListOpsDataConfig:
        """Where the examples come from."""

    @property
    @abc.abstractmethod
    def settings(self) -> Classification | Tagging:
        """Those of the task itself."""

    def resolved(self, corpus: ExampleCorpus[Any]) -> Experiment:
        experiment = with_vocabulary(self.experiment, corpus.tokenizer)
        return with_classes(experiment, self.settings, corpus.labels)

    def loss(self, model: Any) -> LossFunction:
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
                outputs=LOGITS | wanted(dropout_rngs),
            )
            assert output.logits is not None
            found = class_loss(model, output.logits, batch)
            return {**found, **auxiliary(output.aux, found["loss"].weight)}

        return loss

    def batches(self, corpus: ExampleCorpus[Any]) -> TrainingBatches:
        split = corpus.split("train")
        buckets = self.buckets(split, self.experiment.batch_size)
        return TrainingBatches(split, buckets, seed=self.experiment.seed)

    def held_out(self, engine: Engine, examples: Examples, *, whole: bool) -> HeldOutBatches:
        """All of a split, or as much as an evaluation on the way takes."""
        settings = self.experiment.evaluation
        rows = fitting(settings.batch_size or self.experiment.batch_size, engine.mesh)
        return HeldOutBatches(examples, self.buckets(examples, rows), limit=limit(settings, whole))

    def buckets(self, examples: Examples, rows: int) -> tuple[Bucket, ...]:
        """By length, each with so many rows to a batch."""
        return buckets_by_rows(examples.lengths, batch_size=rows, most=self.data.shapes)

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        tokenizer.encode(prompt)


@functools.partial(jax.jit, static_argnames="model")
def likeliest(
    params: Any,
    tokens: jax.Array,  # [B, T]
    segments: jax.Array,  # [B, T]
    *,
    model: Any,  # a Classifier or a Tagger
) -> jax.Array:  # [B] or [B, T]
    """The likeliest class of each text, or tag of each token."""
    logits = model.apply({"params": params}, tokens, segments=segments).logits
    return jnp.argmax(logits, axis=-1)
