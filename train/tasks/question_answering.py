"""Question answering: the answer is a span of a context (Devlin et al. 2019, section 4.2).

For imported models: there are no data to train on here.
"""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.token_labels import TokenLabelDataConfig
from train.data.tokenizer import Tokenizer, TokenPair
from train.errors import UserError
from train.step import Batch, LossFn
from train.tasks.example_task import ExampleTask
from train.tasks.task import (
    ModelInputs,
    TaskConfig,
    TrainedModel,
    check_no_encoder,
    check_no_target,
    token_inputs,
    tokenizer_of,
)
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.heads import QuestionAnswerer
from transformer.validation import Bounds

NO_TRAINING = UserError(
    "task QuestionAnswering: has no data to train or evaluate on; ask an imported model by sample"
)


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(TaskConfig):
    """Question answering by imported models: find the span of a context that is the answer."""

    data_configs = (TokenLabelDataConfig,)

    max_answer_tokens: Annotated[int, Bounds(1, 2**20)] = 30
    """Most tokens of an answer."""

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringTask(ExampleTask):
    """Question answering. A prompt is a question, a line break, and the context."""

    config: QuestionAnswering

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Any:
        raise NO_TRAINING

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> QuestionAnswerer:
        return QuestionAnswerer(self.model_config, hardware, constrain)

    def make_loss_fn(self, model: Any) -> LossFn:
        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            raise NO_TRAINING

        return loss

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        check_no_target(target)
        return pair_inputs(trained, tokenizer_of(trained).encode_pair(*split_prompt(text)))

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the most likely answer: a part of the context."""
        question, context = split_prompt(prompt)
        pair = tokenizer_of(trained).encode_pair(question, context)
        if not len(pair.spans):
            raise UserError("prompt: its context has no tokens; give a text with the answer in it")
        inputs = pair_inputs(trained, pair).arguments
        logits = _token_logits(trained.params, **inputs, model=trained.model)
        of_context = np.asarray(logits)[0, pair.start : pair.start + len(pair.spans)]
        first, last = best_span(of_context, self.config.max_answer_tokens)
        return context[pair.spans[first][0] : pair.spans[last][1]]


def pair_inputs(trained: TrainedModel, pair: TokenPair) -> ModelInputs:
    """Return the inputs of a model for a question and a context."""
    inputs = token_inputs(trained, pair.tokens)
    if trained.model.config.num_token_types > pair.types.max():
        inputs.arguments["token_types"] = pair.types[None]
    return inputs


def split_prompt(prompt: str) -> tuple[str, str]:
    """Return the question, which is the first line of a prompt, and the context."""
    question, _, context = prompt.partition("\n")
    if not context.strip():
        raise UserError(
            "prompt: has no context; give the question, a line break and the text with the answer"
        )
    return question, context


def best_span(logits: np.ndarray, max_tokens: int) -> tuple[int, int]:  # [T, 2] start and end
    """Return the first and the last token of the span with the largest sum of both logits."""
    sums = logits[:, None, 0] + logits[None, :, 1]
    length = np.arange(len(logits))[None] - np.arange(len(logits))[:, None] + 1
    sums = np.where((length >= 1) & (length <= max_tokens), sums, -np.inf)
    first, last = np.unravel_index(np.argmax(sums), sums.shape)
    return int(first), int(last)


@functools.partial(jax.jit, static_argnames="model")
def _token_logits(
    params: Any, tokens: jax.Array, token_types: jax.Array | None = None, *, model: Any
) -> jax.Array:  # [B, T, 2]
    logits = model.apply({"params": params}, tokens, token_types=token_types).logits
    return jnp.asarray(logits)
