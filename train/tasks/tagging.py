"""Token classification: the tag of each word."""

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
from train.tasks.base import Metric, SampleOptions, TextCallback, token_batch_shapes
from train.tasks.classification import LabelPredictionTask, predict_labels
from train.tasks.config import Tagging
from train.tasks.evaluation import gather_to_host, mean_losses
from train.tasks.vocabulary import Labels
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware
from transformer.models.heads import Tagger

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class TaggingTask(LabelPredictionTask):
    """Tagging of words. The best checkpoint has the highest F1 of spans, or accuracy."""

    @property
    def data(self) -> TokenLabelDataConfig:
        assert isinstance(self.experiment.data, TokenLabelDataConfig)
        return self.experiment.data

    @property
    def task_config(self) -> Tagging:
        assert isinstance(self.experiment.task, Tagging)
        return self.experiment.task

    def selection_metric(self, corpus: ExampleCorpus[TokenLabelSplit]) -> Metric:
        return Metric("f1" if are_span_tags(corpus.labels) else "accuracy", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[TokenLabelSplit]:
        return prepare_token_labels(self.data, tokenizer, labels or None)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Tagger:
        return Tagger(
            self.experiment.model,
            hardware,
            constrain,
            num_classes=self.task_config.num_labels,
            head_dropout=self.task_config.classifier_dropout,
        )

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def describe_training_data(self, corpus: ExampleCorpus[TokenLabelSplit]) -> str:
        split = corpus.split("train")
        return f"{split.sentence_indices[-1] + 1:,} sentences with {len(corpus.labels)} tags"

    def evaluate(
        self,
        engine: Engine,
        params: Any,
        corpus: ExampleCorpus[TokenLabelSplit],
        split: str,
        *,
        full_split: bool,
    ) -> dict[str, float]:
        """Return the loss, in nats a word, the accuracy, and F1 where tags spell out spans."""
        sentences = corpus.split(split)
        batches = self.evaluation_batches(engine, sentences, full_split=full_split)
        metrics = mean_losses(engine, params, batches)
        if are_span_tags(corpus.labels):
            metrics["f1"] = span_f1(sentences, predict_rows(engine, params, batches))
        return metrics

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return each prompt's words, split at white space, with their tags: `cat/NOUN`."""
        answers = [self.tag_words(run, prompt.split()) for prompt in prompts]
        if on_text is not None:
            on_text("".join(answers))
        return answers

    def tag_words(self, run: Run, words: Sequence[str]) -> str:
        """Return words with their tags, as one text."""
        max_length = self.data.max_length
        tokens_of = encode_words(run.tokenizer, words)
        word_tokens = [tokens_of[word] for word in words]
        sizes = [len(tokens) for tokens in word_tokens]
        tags: list[str] = []
        for begin, end in split_into_rows(sizes, max_length) if words else ():
            row = np.concatenate(word_tokens[begin:end])[:max_length]
            tokens, real = RaggedArray.from_sequences([row]).pad(np.array([0]), max_length)
            best = predict_labels(run.params, tokens, real.astype(np.int32), model=run.model)[0]
            first_tokens = np.cumsum([0, *sizes[begin : end - 1]])
            tags += [run.labels[index] for index in np.asarray(best)[first_tokens]]
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def predict_rows(
    engine: Engine, params: Any, batches: ExampleEvaluationBatches
) -> dict[int, np.ndarray]:
    """Return the index of the predicted tag at each token of each row, by the row's index."""
    predictions: dict[int, np.ndarray] = {}
    for cursor in range(len(batches)):
        rows = batches.host_batch(cursor, 0, 1)
        host_rows = batches.host_batch(cursor, jax.process_index(), jax.process_count())
        mine = engine.put_batch(host_rows)
        best = predict_labels(params, mine["tokens"], mine["segments"], model=engine.model)
        real = rows["weights"].any(axis=1)
        predictions.update(
            zip(rows["examples"][real].tolist(), gather_to_host(best)[real], strict=True)
        )
    return predictions


def span_f1(split: TokenLabelSplit, predictions: dict[int, np.ndarray]) -> float:
    """Return the F1 of the spans of the sentences of which every row has predictions."""
    rows = range(len(split.sentence_indices))
    # Rows without predictions get the true tags, and their sentences are then left out.
    predicted = split.tags([predictions.get(row, split.targets[row]) for row in rows])
    incomplete = {int(split.sentence_indices[row]) for row in rows if row not in predictions}
    scored = [index for index in range(len(predicted)) if index not in incomplete]
    expected = split.tags()
    return score_spans(
        [expected[index] for index in scored], [predicted[index] for index in scored]
    ).f1
