"""Classification of whole texts, and of their words (tagging)."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from train.data.buckets import RaggedArray
from train.data.examples import ExampleCorpus
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
from train.errors import UsageError
from train.step import Batch, LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses, predict_rows
from train.tasks.example_task import ExampleTask
from train.tasks.metrics import are_span_tags, score_spans
from train.tasks.task import (
    Metric,
    ModelInputs,
    TaskConfig,
    TrainedModel,
    check_causal_pooling,
    check_no_encoder,
    check_no_target,
    token_batch_shapes,
    token_inputs,
    tokenizer_of,
)
from train.tasks.vocabulary import Labels, resolve_num_labels
from transformer.hardware import Hardware
from transformer.layers.basic import fold_in
from transformer.losses import Loss, auxiliary_losses, label_loss, requested_outputs
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.heads import Classifier, Pooling, Tagger
from transformer.models.model import LOGITS
from transformer.validation import Fraction, NonNegativeInt


@dataclasses.dataclass(frozen=True)
class Classification(TaskConfig):
    """Text classification: predict the label of each text."""

    data_configs = (ClassificationDataConfig, ListOpsDataConfig)
    predicts_labels = True

    num_labels: NonNegativeInt = 0
    """Number of labels, C. 0: as many as the training data have."""
    pooling: Pooling = "first"
    """Vector that the label is predicted from: of the first token (a start token), of the last, or
    the mean or the maximum over all tokens."""
    end_token: NonNegativeInt | None = None
    """Pooling last: id of a token, of which the last one in a text is taken, as in BART. None: the
    last token of all."""
    classifier_bias: bool = True
    """Add a bias to the logit of each label. The decoders of transformers have none."""
    classifier_dropout: Fraction = 0.0
    """Dropout rate of the pooled vector, in [0, 1)."""
    word_dropout: Fraction = 0.0
    """Probability that a token of a training text is left out: it is masked like padding, in
    [0, 1) (Iyyer et al. 2015, section 2.3)."""

    def check(self, model: TransformerConfig) -> None:
        check_causal_pooling(self.pooling, model)
        if self.word_dropout and self.pooling == "first":
            raise UsageError(
                "task.word_dropout: would drop the first token, whose vector stands for the "
                "whole text; set task.pooling to mean or max, or task.word_dropout to 0"
            )


@dataclasses.dataclass(frozen=True)
class Tagging(TaskConfig):
    """Token classification: predict the tag of each word at its first subword token."""

    data_configs = (TokenLabelDataConfig,)
    predicts_labels = True

    num_labels: NonNegativeInt = 0
    """Number of tags, C. 0: as many as the training data have."""
    classifier_dropout: Fraction = 0.0
    """Dropout rate of each token's vector, in [0, 1)."""

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)


@dataclasses.dataclass(frozen=True)
class LabelPredictionTask(ExampleTask):
    """Tasks that predict labels of texts or of words, with an encoder and a linear head."""

    config: Classification | Tagging

    def resolve(self, corpus: ExampleCorpus[Any]) -> Self:
        num_labels = resolve_num_labels(self.config.num_labels, corpus.labels)
        return dataclasses.replace(
            super().resolve(corpus), config=dataclasses.replace(self.config, num_labels=num_labels)
        )

    def make_loss_fn(self, model: Any) -> LossFn:
        """Return the cross entropy of the labels, with the accuracy.

        A batch has `tokens` and `segments` [B, T]. `targets` and `weights` are [B] for texts, and
        [B, T] for words, with weight 1 at the first token of each word.
        """
        config = self.config
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


def predict_row(trained: TrainedModel, tokens: np.ndarray, length: int) -> np.ndarray:
    """Return `predict_labels` of one text [t], padded to T, so that one program is compiled."""
    rows, real = RaggedArray.from_sequences([tokens]).pad(np.array([0]), length)
    best = predict_labels(trained.params, rows, real.astype(np.int32), model=trained.model)
    return np.asarray(best)[0]


@dataclasses.dataclass(frozen=True)
class ClassificationTask(LabelPredictionTask):
    """Classification of texts. The best checkpoint is the one with the highest accuracy.

    Evaluations report the loss, in nats a text, and the accuracy.
    """

    config: Classification
    data: ClassificationDataConfig | ListOpsDataConfig

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
        config = self.config
        return Classifier(
            self.model_config,
            hardware,
            constrain,
            num_classes=config.num_labels,
            pooling=config.pooling,
            end_token=config.end_token,
            head_dropout=config.classifier_dropout,
            head_bias=config.classifier_bias,
        )

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length, targets_per_token=False)

    def describe_training_data(self, corpus: ExampleCorpus[ClassificationSplit]) -> str:
        return f"{len(corpus.split('train').tokens):,} texts of {len(corpus.labels)} classes"

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        check_no_target(target)
        return token_inputs(trained, encode_texts(tokenizer_of(trained), [text])[0])

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the most likely label of the prompt."""
        length, tokenizer = self.data.max_length, tokenizer_of(trained)
        [text] = encode_texts(tokenizer, [prompt])
        best = predict_row(trained, cut_text(tokenizer, text, length), length)
        return trained.labels[int(best)]


@dataclasses.dataclass(frozen=True)
class TaggingTask(LabelPredictionTask):
    """Tagging of words. The best checkpoint has the highest F1 of spans, or accuracy."""

    config: Tagging
    data: TokenLabelDataConfig

    def selection_metric(self, corpus: ExampleCorpus[TokenLabelSplit]) -> Metric:
        return Metric("f1" if are_span_tags(corpus.labels) else "accuracy", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[TokenLabelSplit]:
        return prepare_token_labels(self.data, tokenizer, labels or None)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Tagger:
        return Tagger(
            self.model_config,
            hardware,
            constrain,
            num_classes=self.config.num_labels,
            head_dropout=self.config.classifier_dropout,
        )

    def describe_training_data(self, corpus: ExampleCorpus[TokenLabelSplit]) -> str:
        split = corpus.split("train")
        return f"{split.sentence_indices[-1] + 1:,} sentences with {len(corpus.labels)} tags"

    def evaluate(
        self,
        model: EvaluatedModel,
        corpus: ExampleCorpus[TokenLabelSplit],
        split: str,
        options: EvaluationOptions,
    ) -> dict[str, float]:
        """Return the loss, in nats a word, the accuracy, and F1 where tags spell out spans."""
        batches = self.evaluation_batches(corpus, split, options)
        metrics = mean_losses(model, batches)
        if are_span_tags(corpus.labels):
            predictions = predict_rows(
                model,
                batches,
                lambda batch: predict_labels(
                    model.params, batch["tokens"], batch["segments"], model=model.model
                ),
            )
            metrics["f1"] = span_f1(corpus.split(split), predictions)
        return metrics

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        check_no_target(target)
        words, tokenizer = text.split(), tokenizer_of(trained)
        tokens_of, around = encode_words(tokenizer, words), tokenizer.added_token_ids
        row = [around[0], *(tokens_of[word] for word in words), around[1]]
        return token_inputs(trained, np.concatenate(row))

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the prompt's words, split at white space, with their tags: `cat/NOUN`."""
        words, max_length, tokenizer = prompt.split(), self.data.max_length, tokenizer_of(trained)
        tokens_of, (before, after) = encode_words(tokenizer, words), tokenizer.added_token_ids
        room = max_length - len(before) - len(after)
        word_tokens = [tokens_of[word] for word in words]
        sizes = [len(tokens) for tokens in word_tokens]
        tags: list[str] = []
        for begin, end in split_into_rows(sizes, room) if words else ():
            row = np.concatenate([before, np.concatenate(word_tokens[begin:end])[:room], after])
            best = predict_row(trained, row, max_length)
            first_tokens = len(before) + np.cumsum([0, *sizes[begin : end - 1]])
            tags += [trained.labels[index] for index in best[first_tokens]]
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


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
