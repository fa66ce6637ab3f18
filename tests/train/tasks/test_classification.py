import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from tests.train.support import assert_close, assert_same_bits
from tests.train.support import light_compiler as light_compiler
from tests.train.tasks.support import large_params, tiny_classifier, tiny_tagger
from train.assembly import make_task, training_options
from train.data.token_labels import TokenLabelSplit
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.tasks.classification import (
    Classification,
    ClassificationTask,
    Tagging,
    TaggingTask,
    drop_words,
    span_f1,
)
from train.tasks.task import Metric, SampleOptions
from transformer.hardware import Hardware
from transformer.model_context import unconstrained


def tagging_task(experiment: Experiment) -> TaggingTask:
    task = make_task(experiment)
    assert isinstance(task, TaggingTask)
    return task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaggingTask:
    return tagging_task(tiny_tagger(tmp_path_factory.mktemp("tagging")))


def test_span_tags_use_f1_and_other_tags_accuracy(task: TaggingTask) -> None:
    assert task.selection_metric(task.prepare_corpus()) == Metric("f1", lower_is_better=False)
    words: Any = type("Corpus", (), {"labels": ("NOUN", "VERB")})
    assert task.selection_metric(words) == Metric("accuracy", lower_is_better=False)


def some_answers(split: TokenLabelSplit, seed: int) -> dict[int, np.ndarray]:
    drawn = np.random.default_rng(seed)
    rows = range(len(split.sentence_indices))
    return {row: drawn.integers(0, len(split.labels), len(split.tokens[row])) for row in rows}


def test_f1_of_part_of_a_split(task: TaggingTask) -> None:
    split = task.prepare_corpus().split("validation")
    given = some_answers(split, 0)
    full = span_f1(split, given)
    right = {row: np.where(split.targets[row] < 0, 0, split.targets[row]) for row in given}
    assert span_f1(split, right) == 1.0
    assert 0 < full < 1
    some = {row: answer for row, answer in right.items() if row % 3}
    assert span_f1(split, some) == 1.0
    mixed = {**given, **{row: right[row] for row in list(right)[:5]}}
    assert span_f1(split, {row: mixed[row] for row in list(right)[:5]}) == 1.0
    assert span_f1(split, mixed) > full


def test_num_labels_must_match_the_data(tmp_path: Path) -> None:
    wrong = tagging_task(dataclasses.replace(tiny_tagger(tmp_path), task=Tagging(9)))
    with pytest.raises(UserError, match=r"num_labels 9: the data have 3 \(B-ANIMAL, I-ANIMAL, O"):
        wrong.resolve(wrong.prepare_corpus())


def test_words_are_tagged_in_rows_that_the_model_reads(task: TaggingTask) -> None:
    """The tag of a word is that of its first token, in the row of the words around it."""
    corpus = task.prepare_corpus()
    tagger = task.resolve(corpus)
    model = tagger.make_model(Hardware(), unconstrained)
    params = large_params(model, 9)
    # As a published tokenizer: a token before every text, and one after it.
    backend = tokenizers.Tokenizer.from_str(corpus.tokenizer.to_json())
    before, after = ((word, corpus.tokenizer.vocabulary[word]) for word in ("<unk>", "<eos>"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{before[0]} $A {after[0]}", special_tokens=[before, after]
    )
    run: Any = SimpleNamespace(
        model=model, params=params, labels=corpus.labels, tokenizer=Tokenizer(backend)
    )
    drawn = np.random.default_rng(0)
    # The model reads 16 tokens: a row has at most 14 words of one token each.
    sentences = [drawn.choice(["the", "red", "cat", "dog"], size).tolist() for size in (14, 17)]
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens).logits)
    expected = []
    for words in sentences:
        best: list[int] = []
        for row in (words[:14], words[14:]):
            tokens = [before[1], *run.tokenizer.encode(" ".join(row)).tolist(), after[1]]
            if row:
                logits = np.asarray(forward(np.array([tokens])))
                best += logits[0, 1:-1].argmax(axis=-1).tolist()
        pairs = zip(words, best, strict=True)
        expected.append(" ".join(f"{word}/{corpus.labels[index]}" for word, index in pairs))
    assert len({pair.partition("/")[2] for text in expected for pair in text.split()}) > 1
    pieces: list[str] = []
    texts = [" ".join(words) for words in sentences]
    assert tagger.sample(run, texts, SampleOptions(on_text=pieces.append)) == expected
    assert pieces == ["".join(expected)]
    assert tagger.sample(run, [""], SampleOptions()) == [""]


drop = jax.jit(drop_words, static_argnums=1)


def test_word_dropout_drops_each_token_with_its_rate() -> None:
    """Padding stays padding, each text has its own draws, and evaluation drops nothing."""
    lengths = np.arange(1, 401) % 40 + 1
    segments = jnp.asarray(np.arange(40) < lengths[:, None], jnp.int32)
    keys = jax.random.split(jax.random.key(0), len(lengths))
    dropped = np.asarray(drop(segments, 0.3, keys))
    assert np.all(dropped <= segments)
    assert dropped.any(axis=1).all()  # no text loses all of its tokens
    # The exception for texts that would lose all tokens changes the rate by less than 1e-5.
    long = lengths >= 10
    tokens = lengths[long].sum()
    deviation = np.sqrt(0.3 * 0.7 / tokens)
    assert abs(1 - dropped[long].sum() / tokens - 0.3) < 4 * deviation
    assert np.array_equal(drop(segments[::-1], 0.3, keys[::-1])[::-1], dropped)
    assert drop_words(segments, 0.3, None) is segments
    assert drop_words(segments, 0.0, keys) is segments


def test_text_of_one_token_keeps_it() -> None:
    segments = jnp.asarray([[1, 0, 0]] * 50)
    keys = jax.random.split(jax.random.key(1), 50)
    assert np.array_equal(drop(segments, 0.9, keys), segments)


@pytest.mark.full
def test_word_dropout_applies_only_to_the_training_loss(tmp_path: Path) -> None:
    settings = Classification(pooling="max", word_dropout=0.5)
    experiment = dataclasses.replace(tiny_classifier(tmp_path), task=settings)
    task = make_task(experiment)
    corpus: Any = task.prepare_corpus()
    task = task.resolve(corpus)
    assert isinstance(task, ClassificationTask)
    plain = dataclasses.replace(task, config=dataclasses.replace(task.config, word_dropout=0))
    model = task.make_model(Hardware(), unconstrained)
    params = jax.jit(model.init_params)(jax.random.key(0))
    batch: Any = task.training_batches(corpus, training_options(experiment)).host_batch(0, 0, 1)
    keys = jax.random.split(jax.random.key(1), len(batch["tokens"]))
    loss = jax.jit(task.make_loss_fn(model))
    plain_loss = jax.jit(plain.make_loss_fn(model))
    dropped = {**batch, "segments": drop_words(batch["segments"], 0.5, keys)}
    result = loss(params, batch, keys)["loss"]
    assert_close(result, plain_loss(params, dropped, keys)["loss"], 1e-6)
    assert result.total != plain_loss(params, batch, keys)["loss"].total
    assert_same_bits(loss(params, batch, None), plain_loss(params, batch, None))
