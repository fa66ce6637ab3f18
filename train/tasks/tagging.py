"""Tagging: the tag of each word."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.buckets import RaggedArray
from train.data.example_configs import TokenLabelDataConfig
from train.data.examples import ExampleCorpus, ExampleEvaluationBatches
from train.data.token_labels import (
    TokenLabelSplit,
    encode_words,
    prepare_token_labels,
    split_into_rows,
)
from train.data.tokenizer import Tokenizer
from train.evaluation.metrics import are_span_tags, score_spans
from train.tasks.base import Metric, SampleOptions, TextCallback, gather_to_host, mean_losses
from train.tasks.classification import LabelPredictionTask, predict_labels
from train.tasks.config import Tagging
from train.tasks.vocabulary import Labels
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware
from transformer.models.heads import Tagger

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[TokenLabelSplit]


@dataclasses.dataclass(frozen=True)
class TaggingTask(LabelPredictionTask):
    """A tagger of words, judged by its accuracy, or by F1 where tags spell out spans."""

    @property
    def data(self) -> TokenLabelDataConfig:
        assert isinstance(
            self.experiment.data, TokenLabelDataConfig
        )  # as the experiment has checked
        return self.experiment.data

    @property
    def task_config(self) -> Tagging:
        assert isinstance(self.experiment.task, Tagging)
        return self.experiment.task

    def selection_metric(self, corpus: Corpus) -> Metric:
        return Metric("f1" if are_span_tags(corpus.labels) else "accuracy", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        return prepare_token_labels(self.data, tokenizer, labels or None)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Tagger:
        settings, config = self.task_config, self.experiment.model
        return Tagger(
            config,
            hardware,
            constrain,
            num_classes=settings.num_labels,
            head_dropout=settings.classifier_dropout,
        )

    def describe_training_data(self, corpus: Corpus) -> str:
        split = corpus.split("train")
        return f"{split.sentence_indices[-1] + 1:,} sentences with {len(corpus.labels)} tags"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Loss in nats a word, accuracy, and where tags spell out spans their F1."""
        sentences = corpus.split(split)
        batches = self.evaluation_batches(engine, sentences, full_split=full_split)
        metrics = mean_losses(engine, params, batches)
        if are_span_tags(corpus.labels):
            metrics["span_f1"] = span_f1(sentences, predict_rows(engine, params, batches))
        return metrics

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Each prompt's words (what stands between spaces) with their tags: `cat/NOUN`."""
        found = [self.tag_words(run, prompt.split()) for prompt in prompts]
        if on_text is not None:
            on_text("".join(found))
        return found

    def tag_words(self, run: Run, words: Sequence[str]) -> str:
        longest = self.data.max_length
        known = encode_words(run.tokenizer, words)
        pieces = [known[word] for word in words]
        sizes = [len(each) for each in pieces]
        tags: list[str] = []
        for begin, end in split_into_rows(sizes, longest) if words else ():
            row = RaggedArray.from_sequences([np.concatenate(pieces[begin:end])[:longest]])
            tokens, real = row.pad(np.array([0]), longest)
            best = predict_labels(run.params, tokens, real.astype(np.int32), model=run.model)[0]
            first = np.cumsum([0, *sizes[begin : end - 1]])
            tags += [run.labels[number] for number in np.asarray(best)[first]]
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def predict_rows(
    engine: Engine, params: Any, batches: ExampleEvaluationBatches
) -> dict[int, np.ndarray]:
    """The number of the likeliest tag at each token of each row, by the row's number."""
    found: dict[int, np.ndarray] = {}
    for cursor in range(len(batches)):
        rows = batches.host_batch(cursor, 0, 1)
        mine = engine.put_batch(
            batches.host_batch(cursor, jax.process_index(), jax.process_count())
        )
        best = predict_labels(params, mine["tokens"], mine["segments"], model=engine.model)
        real = rows["weights"].any(axis=1)
        found.update(zip(rows["examples"][real].tolist(), gather_to_host(best)[real], strict=True))
    return found


def span_f1(split: TokenLabelSplit, predictions: dict[int, np.ndarray]) -> float:
    """F1 of the spans of those sentences of which all rows have answers."""
    rows = range(len(split.sentence_indices))
    predicted = split.tags([predictions.get(row, split.targets[row]) for row in rows])
    without = {int(split.sentence_indices[row]) for row in rows if row not in predictions}
    chosen = [number for number in range(len(predicted)) if number not in without]
    expected = split.tags()
    return score_spans([expected[n] for n in chosen], [predicted[n] for n in chosen]).f1
