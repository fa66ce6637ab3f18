"""Classification: the class of each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.example_corpus import ExampleCorpus
from train.data.labelled import LabelledSplit, encode_texts, prepare_labelled
from train.data.labelled_config import LabelledDataConfig
from train.data.listops import prepare_listops
from train.data.listops_config import ListOpsDataConfig
from train.data.ragged import Ragged
from train.data.tokenizer import Tokenizer
from train.labels import Labels
from train.tasks.classes import ClassesTask, likeliest
from train.tasks.config import Classification
from train.tasks.measuring import means
from train.tasks.task import Metric, SampleOptions, Show
from transformer.classifier import Classifier
from transformer.hardware import Hardware
from transformer.shared import Constrain

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[LabelledSplit]


@dataclasses.dataclass(frozen=True)
class ClassificationTask(ClassesTask):
    """A classifier of texts, judged by its accuracy."""

    @property
    def data(self) -> LabelledDataConfig | ListOpsDataConfig:
        data = self.experiment.data
        assert isinstance(data, LabelledDataConfig | ListOpsDataConfig)  # as has been checked
        return data

    @property
    def settings(self) -> Classification:
        assert isinstance(self.experiment.task, Classification)
        return self.experiment.task

    def metric(self, corpus: Corpus) -> Metric:
        return Metric("accuracy", lower_is_better=False)

    def prepare(self, tokenizer: Tokenizer | None = None, labels: Labels | None = None) -> Corpus:
        data = self.data
        if isinstance(data, ListOpsDataConfig):
            return prepare_listops(data, tokenizer, labels or None)
        return prepare_labelled(data, tokenizer, labels or None)

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

    def amount(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').tokens):,} texts of {len(corpus.labels)} classes"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, whole: bool
    ) -> dict[str, float]:
        """Loss in nats a text, and accuracy."""
        return means(engine, params, self.held_out(engine, corpus.split(split), whole=whole))

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
