"""Question answering: the answer is a span of a context (Devlin et al. 2019, section 4.2)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from train.data.examples import ExampleCorpus
from train.data.question_answers import (
    NO_SPAN,
    Question,
    QuestionAnsweringDataConfig,
    QuestionSplit,
    make_question_split,
    prepare_questions,
)
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.step import Batch, LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses, predict_rows
from train.tasks.example_task import ExampleTask
from train.tasks.metrics import score_answer
from train.tasks.task import (
    Metric,
    ModelInputs,
    TaskConfig,
    TrainedModel,
    check_no_encoder,
    check_no_target,
    token_batch_shapes,
    token_inputs,
    tokenizer_of,
)
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.losses import Loss, auxiliary_losses, label_loss, requested_outputs
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.heads import QuestionAnswerer
from transformer.models.model import LOGITS
from transformer.validation import Bounds, Fraction

Corpus = ExampleCorpus[QuestionSplit]


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(TaskConfig):
    """Question answering: find the span of a context that is the answer."""

    data_configs = (QuestionAnsweringDataConfig,)

    max_answer_tokens: Annotated[int, Bounds(1, 2**20)] = 30
    """Most tokens of an answer."""
    may_abstain: bool | None = None
    """Answer with nothing where the first token, which stands for that, scores higher than any span
    (SQuAD 2.0). None: if the data have questions without an answer."""
    classifier_dropout: Fraction = 0.0
    """Dropout rate of each token's vector, in [0, 1)."""

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringTask(ExampleTask):
    """Question answering. A prompt is a question, a line break, and the context.

    The best checkpoint is the one with the highest F1.
    """

    config: QuestionAnswering
    data: QuestionAnsweringDataConfig

    @property
    def untrained_parts(self) -> tuple[str, ...]:
        return ()  # the context has a token type of its own

    def selection_metric(self, corpus: Corpus) -> Metric:
        return Metric("f1", lower_is_better=False)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        return prepare_questions(self.data, tokenizer)

    def resolve(self, corpus: Corpus) -> Self:
        task = super().resolve(corpus)
        if self.config.may_abstain is not None:
            return task
        may_abstain = corpus.split("train").has_unanswerable
        config = dataclasses.replace(self.config, may_abstain=may_abstain)
        return dataclasses.replace(task, config=config)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> QuestionAnswerer:
        dropout = self.config.classifier_dropout
        return QuestionAnswerer(self.model_config, hardware, constrain, head_dropout=dropout)

    def make_loss_fn(self, model: Any) -> LossFn:
        """Return the mean of the cross entropies of the answer's first and last token.

        `accuracy` is the fraction of both that are right. Padding is no candidate. A batch is that
        of `QuestionSplit.batch`.
        """

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                segments=batch["segments"],
                token_types=batch["token_types"] if has_types(model) else None,
                dropout_rngs=dropout_rngs,
                outputs=LOGITS | requested_outputs(dropout_rngs),
            )
            assert output.logits is not None
            logits = output.logits.astype(model.config.precision.loss)
            logits = jnp.where(batch["segments"][..., None] != 0, logits, PADDING_LOGIT)
            losses = label_loss(model, logits.swapaxes(1, 2), batch)  # over T tokens
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = token_batch_shapes(batch_size, length)
        shapes["token_types"] = shapes["tokens"]
        for name in ("targets", "weights"):
            shapes[name] = jax.ShapeDtypeStruct((batch_size, 2), shapes[name].dtype)
        return shapes

    def describe_training_data(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').questions):,} questions"

    def evaluate(
        self, model: EvaluatedModel, corpus: Corpus, split: str, options: EvaluationOptions
    ) -> dict[str, float]:
        """Return the loss, in nats a token to find, the exact match and F1 of SQuAD's script."""
        batches = self.evaluation_batches(corpus, split, options)
        metrics = mean_losses(model, batches)
        rows = predict_rows(
            model, batches, lambda batch: token_logits(model.model, model.params, batch)
        )
        examples, may_abstain = corpus.split(split), self.config.may_abstain
        if may_abstain is None:  # an imported model, whose run has no training data
            may_abstain = examples.has_unanswerable
        scores = [
            score_answer(answer, [text for text, _ in examples.questions[index].answers])
            for index, answer in self.find_answers(examples, rows, may_abstain).items()
        ]
        for name in ("exact_match", "f1"):
            metrics[name] = float(np.mean([getattr(each, name) for each in scores]))
        return metrics

    def find_answers(
        self, split: QuestionSplit, logits: Mapping[int, np.ndarray], may_abstain: bool
    ) -> dict[int, str]:
        """Return the most likely answers, parts of the contexts, by the index of the question.

        Args:
          split: The questions.
          logits: Logits [T or more, 2] of rows. Questions of which every row has some are answered;
            if there are none, all of which any has.
          may_abstain: An answer may be empty: where the first token of every row scores higher than
            the best span of any.
        """
        best: dict[int, tuple[float, str]] = {}
        nothing: dict[int, float] = {}
        for row, index in enumerate(split.question_indices.tolist()):
            if row not in logits:
                continue
            starts, ends = split.starts[row], split.ends[row]
            [tokens] = np.nonzero(starts != NO_SPAN)
            nothing[index] = min(nothing.get(index, np.inf), float(logits[row][0].sum()))
            best.setdefault(index, (-np.inf, ""))
            if len(tokens):
                of_context = logits[row][tokens]
                first, last, score = best_span(of_context, self.config.max_answer_tokens)
                text = split.questions[index].context[starts[tokens[first]] : ends[tokens[last]]]
                best[index] = max(best[index], (score, text), key=lambda each: each[0])
        incomplete = {
            index for row, index in enumerate(split.question_indices.tolist()) if row not in logits
        }
        answers = {
            index: "" if may_abstain and nothing[index] > score else text
            for index, (score, text) in best.items()
        }
        complete = {index: text for index, text in answers.items() if index not in incomplete}
        return complete or answers  # of few batches and long texts, what there is

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        split_prompt(prompt)

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        check_no_target(target)
        pair = tokenizer_of(trained).encode_pair(*split_prompt(text))
        inputs = token_inputs(trained, pair.tokens)
        if has_types(trained.model):
            inputs.arguments["token_types"] = pair.types[None]
        return inputs

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the most likely answer: a part of the context, or nothing."""
        asked = Question(*split_prompt(prompt), (), "prompt")
        length, overlap = self.data.max_length, self.data.overlap
        split = make_question_split(tokenizer_of(trained), [asked], length, overlap)
        if (split.starts.values == NO_SPAN).all():
            raise UserError("prompt: its context has no tokens; give a text with the answer in it")
        logits = {}
        for row in range(len(split.question_indices)):  # one by one: one program for all prompts
            batch = split.batch(np.array([row]), (length,))
            logits[row] = np.asarray(token_logits(trained.model, trained.params, batch))[0]
        return self.find_answers(split, logits, bool(self.config.may_abstain))[0]


PADDING_LOGIT = -1e9


def has_types(model: Any) -> bool:
    """Return True if a model has an embedding of token types."""
    return bool(model.config.num_token_types > 1)


def split_prompt(prompt: str) -> tuple[str, str]:
    """Return the question, which is the first line of a prompt, and the context."""
    question, _, context = prompt.partition("\n")
    if not context.strip():
        raise UserError(
            "prompt: has no context; give the question, a line break and the text with the answer"
        )
    return question, context


def best_span(
    logits: np.ndarray,  # [T, 2] start and end
    max_tokens: int,
) -> tuple[int, int, float]:
    """Return the first and the last token of the span with the largest sum of logits, and that."""
    sums = logits[:, None, 0] + logits[None, :, 1]
    length = np.arange(len(logits))[None] - np.arange(len(logits))[:, None] + 1
    sums = np.where((length >= 1) & (length <= max_tokens), sums, -np.inf)
    first, last = np.unravel_index(np.argmax(sums), sums.shape)
    return int(first), int(last), float(sums[first, last])


def token_logits(model: Any, params: Any, batch: Mapping[str, Any]) -> jax.Array:  # [B, T, 2]
    """Return the logits of a batch of `QuestionSplit.batch`, in float32."""
    types = batch["token_types"] if has_types(model) else None
    logits = _token_logits(params, batch["tokens"], batch["segments"], types, model=model)
    return jnp.asarray(logits)


@functools.partial(jax.jit, static_argnames="model")
def _token_logits(
    params: Any,
    tokens: jax.Array,  # [B, T]
    segments: jax.Array,  # [B, T]
    token_types: jax.Array | None,  # [B, T]
    *,
    model: Any,
) -> jax.Array:  # [B, T, 2]
    variables = {"params": params}
    logits = model.apply(variables, tokens, segments=segments, token_types=token_types).logits
    return jnp.asarray(logits, jnp.float32)
