"""Tagging: the tag of each word."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.example_batches import HeldOutBatches
from train.data.example_corpus import ExampleCorpus
from train.data.ragged import Ragged
from train.data.tagged import TaggedSplit, encode_words, prepare_tagged, rows_of_words
from train.data.tagged_config import TaggedDataConfig
from train.data.tokenizer import Tokenizer
from train.labels import Labels
from train.scores.spans import score_spans, spell_spans
from train.tasks.classes import ClassesTask, likeliest
from train.tasks.config import Tagging
from train.tasks.measuring import fetched, means
from train.tasks.task import Metric, SampleOptions, Show
from transformer.hardware import Hardware
from transformer.shared import Constrain
from transformer.tagger import Tagger

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[TaggedSplit]


@dataclasses.dataclass(frozen=True)
class TaggingTask(ClassesTask):
    """A tagger of words, judged by its accuracy, or by F1 where tags spell out spans."""

    @property
    def data(self) -> TaggedDataConfig:
        assert isinstance(self.experiment.data, TaggedDataConfig)  # as the experiment has checked
        return self.experiment.data

    @property
    def settings(self) -> Tagging:
        assert isinstance(self.experiment.task, Tagging)
        return self.experiment.task

    def metric(self, corpus: Corpus) -> Metric:
        return Metric("f1" if spell_spans(corpus.labels) else "accuracy", lower_is_better=False)

    def prepare(self, tokenizer: Tokenizer | None = None, labels: Labels | None = None) -> Corpus:
        return prepare_tagged(self.data, tokenizer, labels or None)

    def model(self, hardware: Hardware, constrain: Constrain) -> Tagger:
        settings, config = self.settings, self.experiment.model
        return Tagger(
            config, hardware, constrain, classes=settings.classes, head_dropout=settings.dropout
        )

    def amount(self, corpus: Corpus) -> str:
        split = corpus.split("train")
        return f"{split.sentence[-1] + 1:,} sentences with {len(corpus.labels)} tags"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, whole: bool
    ) -> dict[str, float]:
        """Loss in nats a word, accuracy, and where tags spell out spans their F1."""
        sentences = corpus.split(split)
        batches = self.held_out(engine, sentences, whole=whole)
        metrics = means(engine, params, batches)
        if spell_spans(corpus.labels):
            metrics["f1"] = f1(sentences, answers(engine, params, batches))
        return metrics

    def sample(
        self, run: Run, prompts: Sequence[str], options: SampleOptions, show: Show | None = None
    ) -> list[str]:
        """Each prompt's words (what stands between spaces) with their tags: `cat/NOUN`."""
        found = [self.tagged(run, prompt.split()) for prompt in prompts]
        if show is not None:
            show("".join(found))
        return found

    def tagged(self, run: Run, words: Sequence[str]) -> str:
        longest = self.data.max_length
        known = encode_words(run.tokenizer, words)
        pieces = [known[word] for word in words]
        sizes = [len(each) for each in pieces]
        tags: list[str] = []
        for begin, end in rows_of_words(sizes, longest) if words else ():
            row = Ragged.of([np.concatenate(pieces[begin:end])[:longest]])
            tokens, real = row.padded(np.array([0]), longest)
            best = likeliest(run.params, tokens, real.astype(np.int32), model=run.model)[0]
            first = np.cumsum([0, *sizes[begin : end - 1]])
            tags += [run.labels[number] for number in np.asarray(best)[first]]
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def answers(engine: Engine, params: Any, batches: HeldOutBatches) -> dict[int, np.ndarray]:
    """The number of the likeliest tag at each token of each row, by the row's number."""
    found: dict[int, np.ndarray] = {}
    for cursor in range(len(batches)):
        rows = batches.host(cursor, 0, 1)
        mine = engine.put(batches.host(cursor, jax.process_index(), jax.process_count()))
        best = likeliest(params, mine["tokens"], mine["segments"], model=engine.model)
        real = rows["weights"].any(axis=1)
        found.update(zip(rows["examples"][real].tolist(), fetched(best)[real], strict=True))
    return found


def f1(split: TaggedSplit, given: dict[int, np.ndarray]) -> float:
    """F1 of the spans of those sentences of which all rows have answers."""
    rows = range(len(split.sentence))
    predicted = split.tags([given.get(row, split.targets[row]) for row in rows])
    without = {int(split.sentence[row]) for row in rows if row not in given}
    chosen = [number for number in range(len(predicted)) if number not in without]
    expected = split.tags()
    return score_spans([expected[n] for n in chosen], [predicted[n] for n in chosen]).f1
