"""Classification: the class of each text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.buckets import buckets_by_rows
from train.data.example_batches import HeldOutBatches, TrainingBatches
from train.data.example_corpus import ExampleCorpus
from train.data.labelled import LabelledSplit, encode_texts, prepare_labelled
from train.data.labelled_config import LabelledDataConfig
from train.data.listops import prepare_listops
from train.data.listops_config import ListOpsDataConfig
from train.data.ragged import Ragged
from train.data.tokenizer import Tokenizer
from train.experiment import Experiment
from train.labels import Labels
from train.step import Batch, LossFunction
from train.tasks.config import Classification
from train.tasks.losses import auxiliary, class_loss, wanted
from train.tasks.measuring import fitting, limit, means
from train.tasks.task import Metric, SampleOptions, Show, Task
from train.tasks.vocabulary import with_classes, with_vocabulary
from transformer.classifier import Classifier
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.model import LOGITS
from transformer.shared import Constrain

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[LabelledSplit]


@dataclasses.dataclass(frozen=True)
class ClassificationTask(Task):
    """A classifier of texts, judged by its accuracy."""

    experiment: Experiment

    @property
    def data(self) -> LabelledDataConfig | ListOpsDataConfig:
        data = self.experiment.data
        assert isinstance(data, LabelledDataConfig | ListOpsDataConfig)  # as has been checked
        return data

    @property
    def settings(self) -> Classification:
        assert isinstance(self.experiment.task, Classification)
        return self.experiment.task

    @property
    def continues(self) -> bool:
        return False

    @property
    def quoted(self) -> dict[str, str]:
        return {}

    def metric(self, corpus: Corpus) -> Metric:
        return Metric("accuracy", lower_is_better=False)

    def prepare(self, tokenizer: Tokenizer | None = None, labels: Labels | None = None) -> Corpus:
        data = self.data
        if isinstance(data, ListOpsDataConfig):
            return prepare_listops(data, tokenizer, labels or None)
        return prepare_labelled(data, tokenizer, labels or None)

    def resolved(self, corpus: Corpus) -> Experiment:
        experiment = with_vocabulary(self.experiment, corpus.tokenizer)
        return with_classes(experiment, self.settings, corpus.labels)

    def model(self, hardware: Hardware, constrain: Constrain) -> Classifier:
        settings = self.settings
        return Classifier(
            self.experiment.model,
            hardware,
            constrain,
            classes=settings.classes,
            pooling=settings.pooling,
            head_dropout=settings.dropout,
        )

    def loss(self, model: Classifier) -> LossFunction:
        """The cross entropy of the classes.

        A batch has `tokens` and `segments` [B, T], `targets` and `weights` [B].
        """

        def loss(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                segments=batch["segments"],
                keys=keys,
                want=LOGITS | wanted(keys),
            )
            assert output.logits is not None
            found = class_loss(model, output.logits, batch)
            return {**found, **auxiliary(output.aux, found["loss"].weight)}

        return loss

    def batches(self, corpus: Corpus) -> TrainingBatches:
        split = corpus.split("train")
        size, shapes = self.experiment.batch_size, self.data.shapes
        buckets = buckets_by_rows(split.lengths, batch_size=size, most=shapes)
        return TrainingBatches(split, buckets, seed=self.experiment.seed)

    def amount(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').tokens):,} texts of {len(corpus.labels)} classes"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, whole: bool
    ) -> dict[str, float]:
        """Loss in nats a text, and accuracy."""
        settings, texts = self.experiment.evaluation, corpus.split(split)
        rows = fitting(settings.batch_size or self.experiment.batch_size, engine.mesh)
        buckets = buckets_by_rows(texts.lengths, batch_size=rows, most=self.data.shapes)
        return means(engine, params, HeldOutBatches(texts, buckets, limit=limit(settings, whole)))

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        tokenizer.encode(prompt)

    def sample(
        self, run: Run, prompts: Sequence[str], options: SampleOptions, show: Show | None = None
    ) -> list[str]:
        """The likeliest class of each prompt."""
        length = self.data.max_length
        texts = Ragged.of([text[:length] for text in encode_texts(run.tokenizer, prompts)])
        found = []
        for number in range(len(prompts)):
            tokens, real = texts.padded(np.array([number]), length)
            segments = real.astype(np.int32)
            best = likeliest(run.params, tokens, segments, model=run.model)
            found.append(run.labels[int(best[0])])
        if show is not None:
            show("".join(found))
        return found


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
