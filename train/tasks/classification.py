"""Classification: the class of each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.example_corpus import ExampleCorpus
from train.data.labelled import ClassificationSplit, encode_texts, prepare_classification
from train.data.labelled_config import ClassificationDataConfig
from train.data.listops import prepare_listops
from train.data.listops_config import ListOpsDataConfig
from train.data.ragged import RaggedArray
from train.data.tokenizer import Tokenizer
from train.labels import Labels
from train.tasks.classes import LabelPredictionTask, predict_labels
from train.tasks.config import Classification
from train.tasks.measuring import mean_losses
from train.tasks.task import Metric, SampleOptions, TextCallback
from transformer.classifier import Classifier
from transformer.hardware import Hardware
from transformer.shared import ActivationConstraint

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

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
