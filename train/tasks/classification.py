"""Classification of whole texts, and of their words (tagging)."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.buckets import Bucket, RaggedArray, bucket_by_rows
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    ExampleEvaluationBatches,
    Examples,
    ExampleTrainingBatches,
)
from train.data.listops import ListOpsDataConfig, prepare_listops
from train.data.text_labels import (
    ClassificationDataConfig,
    ClassificationSplit,
    cut_text,
    encode_texts,
    prepare_classification,
)
from train.data.token_labels import (
    TokenLabelDataConfig,
    TokenLabelSplit,
    encode_words,
    prepare_token_labels,
    split_into_rows,
)
from train.data.tokenizer import Tokenizer
from train.evaluation.metrics import (
    are_span_tags,
    gather_to_host,
    max_eval_batches,
    mean_losses,
    round_up_batch_size,
    score_spans,
)
from train.experiment import Experiment
from train.runtime.stages import track
from train.step import Batch, LossFn
from train.tasks.task import (
    Metric,
    ModelInputs,
    SampleOptions,
    Task,
    TextCallback,
    check_no_target,
    token_batch_shapes,
    token_inputs,
)
from train.tasks.task_configs import Classification, Tagging
from train.tasks.vocabulary import Labels, resolve_num_labels, resolve_vocab_size, tokenizer_of
from transformer.hardware import Hardware
from transformer.layers.basic import fold_in
from transformer.losses import Loss, auxiliary_losses, label_loss, requested_outputs
from transformer.model_context import ActivationConstraint
from transformer.models.heads import Classifier, Tagger
from transformer.models.model import LOGITS

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class LabelPredictionTask(Task):
    """Tasks that predict labels of texts or of words, with an encoder and a linear head.

    Examples are grouped by length into buckets, and padded to the length of their bucket.
    """

    experiment: Experiment

    @property
    @abc.abstractmethod
    def data(self) -> ExampleDataConfig:
        """Settings of the data."""

    @property
    @abc.abstractmethod
    def task_config(self) -> Classification | Tagging:
        """Settings of the task."""

    def resolve_experiment(self, corpus: ExampleCorpus[Any]) -> Experiment:
        experiment = resolve_vocab_size(self.experiment, corpus.tokenizer)
        return resolve_num_labels(experiment, self.task_config, corpus.labels)

    def make_loss_fn(self, model: Any) -> LossFn:
        """Return the cross entropy of the labels, with the accuracy.

        A batch has `tokens` and `segments` [B, T]. `targets` and `weights` are [B] for texts, and
        [B, T] for words, with weight 1 at the first token of each word.
        """
        config = self.task_config
        word_dropout = config.word_dropout if isinstance(config, Classification) else 0.0

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                segments=drop_words(batch["segments"], word_dropout, dropout_rngs),
                dropout_rngs=dropout_rngs,
                outputs=LOGITS | requested_outputs(dropout_rngs),
            )
            assert output.logits is not None
            losses = label_loss(model, output.logits, batch)
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def training_batches(self, corpus: ExampleCorpus[Any]) -> ExampleTrainingBatches:
        split = corpus.split("train")
        buckets = self.make_buckets(split, self.experiment.batch_size)
        return ExampleTrainingBatches(split, buckets, seed=self.experiment.seed)

    def evaluation_batches(
        self, engine: Engine, examples: Examples, *, full_split: bool
    ) -> ExampleEvaluationBatches:
        """Return the batches of a whole split, or of a part for an evaluation during training."""
        config = self.experiment.evaluation
        batch_size = config.batch_size or self.experiment.batch_size
        buckets = self.make_buckets(examples, round_up_batch_size(batch_size, engine.mesh))
        return ExampleEvaluationBatches(
            examples, buckets, max_batches=max_eval_batches(config, full_split)
        )

    def make_buckets(self, examples: Examples, batch_size: int) -> tuple[Bucket, ...]:
        """Return buckets by length, each with batches of `batch_size` rows."""
        return bucket_by_rows(
            examples.lengths, batch_size=batch_size, max_buckets=self.data.max_buckets
        )


WORD_DROPOUT_STREAM = 1 << 20
"""Random stream of word dropout. A model's layers have the streams from 0 on."""


def drop_words(
    segments: jax.Array,  # [B, T] 0 is padding
    rate: float,
    dropout_rngs: jax.Array | None,  # [B] typed random keys; None: not training
) -> jax.Array:  # [B, T]
    """Return segments with each token turned into padding with probability `rate`.

    No other token attends to it, pooling leaves it out, and the others keep their positions
    (word dropout: Iyyer et al. 2015, section 2.3). A text that would lose all tokens keeps all.
    """
    if dropout_rngs is None or rate == 0:
        return segments
    draw = lambda key: jax.random.bernoulli(key, 1 - rate, segments.shape[1:])  # noqa: E731
    is_kept = jax.vmap(draw)(fold_in(dropout_rngs, WORD_DROPOUT_STREAM)) * segments
    return jnp.where(is_kept.any(axis=1, keepdims=True), is_kept, segments)


@functools.partial(jax.jit, static_argnames="model")
def predict_labels(
    params: Any,
    tokens: jax.Array,  # [B, T]
    segments: jax.Array,  # [B, T]
    *,
    model: Any,  # a Classifier or a Tagger
) -> jax.Array:  # [B] or [B, T]
    """Return the index of the most likely label of each text, or of each token."""
    logits = model.apply({"params": params}, tokens, segments=segments).logits
    return jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class ClassificationTask(LabelPredictionTask):
    """Classification of texts. The best checkpoint is the one with the highest accuracy."""

    @property
    def data(self) -> ClassificationDataConfig | ListOpsDataConfig:
        data = self.experiment.data
        assert isinstance(data, ClassificationDataConfig | ListOpsDataConfig)
        return data

    @property
    def task_config(self) -> Classification:
        assert isinstance(self.experiment.task, Classification)
        return self.experiment.task

    def selection_metric(self, corpus: ExampleCorpus[ClassificationSplit]) -> Metric:
        return Metric("accuracy", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[ClassificationSplit]:
        data = self.data
        if isinstance(data, ListOpsDataConfig):
            return prepare_listops(data, tokenizer, labels or None)
        return prepare_classification(data, tokenizer, labels or None)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Classifier:
        config = self.task_config
        return Classifier(
            self.experiment.model,
            hardware,
            constrain,
            num_classes=config.num_labels,
            pooling=config.pooling,
            head_dropout=config.classifier_dropout,
        )

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length, targets_per_token=False)

    def describe_training_data(self, corpus: ExampleCorpus[ClassificationSplit]) -> str:
        return f"{len(corpus.split('train').tokens):,} texts of {len(corpus.labels)} classes"

    def evaluate(
        self,
        engine: Engine,
        params: Any,
        corpus: ExampleCorpus[ClassificationSplit],
        split: str,
        *,
        full_split: bool,
    ) -> dict[str, float]:
        """Return the loss, in nats a text, and the accuracy."""
        batches = self.evaluation_batches(engine, corpus.split(split), full_split=full_split)
        return mean_losses(engine, params, batches)

    def model_inputs(self, run: Run, text: str, target: str | None = None) -> ModelInputs:
        check_no_target(target)
        return token_inputs(run, encode_texts(tokenizer_of(run), [text])[0])

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return the most likely label of each prompt."""
        length, tokenizer = self.data.max_length, tokenizer_of(run)
        texts = RaggedArray.from_sequences(
            [cut_text(tokenizer, text, length) for text in encode_texts(tokenizer, prompts)]
        )
        answers = []
        for index in range(len(prompts)):
            # One shape for all prompts, so that one program is compiled.
            tokens, real = texts.pad(np.array([index]), length)
            best = predict_labels(run.params, tokens, real.astype(np.int32), model=run.model)
            answers.append(run.labels[int(best[0])])
        if on_text is not None:
            on_text("".join(answers))
        return answers


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

    def model_inputs(self, run: Run, text: str, target: str | None = None) -> ModelInputs:
        check_no_target(target)
        words, tokenizer = text.split(), tokenizer_of(run)
        tokens_of, around = encode_words(tokenizer, words), tokenizer.added_token_ids
        row = [around[0], *(tokens_of[word] for word in words), around[1]]
        return token_inputs(run, np.concatenate(row))

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
        max_length, tokenizer = self.data.max_length, tokenizer_of(run)
        tokens_of, (before, after) = encode_words(tokenizer, words), tokenizer.added_token_ids
        room = max_length - len(before) - len(after)
        word_tokens = [tokens_of[word] for word in words]
        sizes = [len(tokens) for tokens in word_tokens]
        tags: list[str] = []
        for begin, end in split_into_rows(sizes, room) if words else ():
            row = np.concatenate([before, np.concatenate(word_tokens[begin:end])[:room], after])
            tokens, real = RaggedArray.from_sequences([row]).pad(np.array([0]), max_length)
            best = predict_labels(run.params, tokens, real.astype(np.int32), model=run.model)[0]
            first_tokens = len(before) + np.cumsum([0, *sizes[begin : end - 1]])
            tags += [run.labels[index] for index in np.asarray(best)[first_tokens]]
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def predict_rows(
    engine: Engine, params: Any, batches: ExampleEvaluationBatches
) -> dict[int, np.ndarray]:
    """Return the index of the predicted tag at each token of each row, by the row's index."""
    predictions: dict[int, np.ndarray] = {}
    for cursor in track(range(len(batches)), "evaluating spans"):
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
