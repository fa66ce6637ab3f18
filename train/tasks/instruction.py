"""Instruction tuning: predict the answers of conversations, given all before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.buckets import bucket_by_rows
from train.data.chat_template import ASSISTANT, NO_VARIABLES, ChatTemplate, Message
from train.data.conversations import (
    ConversationDataConfig,
    ConversationSplit,
    prepare_conversations,
)
from train.data.examples import (
    ExampleCorpus,
    ExampleEvaluationBatches,
    ExampleTrainingBatches,
)
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.metrics import (
    max_eval_batches,
    mean_losses,
    perplexity,
    round_up_batch_size,
)
from train.experiment import Experiment
from train.step import LossFn
from train.tasks.task import SampleOptions, Task, TextCallback, token_batch_shapes
from train.tasks.text_completion import complete_tokens
from train.tasks.vocabulary import Labels, tokenizer_of
from transformer.hardware import Hardware
from transformer.losses import next_token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.language_model import LanguageModel

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class InstructionTask(Task):
    """Instruction tuning. The best checkpoint is the one with the lowest loss of the answers."""

    experiment: Experiment

    @property
    def data(self) -> ConversationDataConfig:
        assert isinstance(self.experiment.data, ConversationDataConfig)
        return self.experiment.data

    @property
    def supported_options(self) -> tuple[str, ...]:
        return "max_new_tokens", "temperature", "top_k", "top_p", "seed"

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[ConversationSplit]:
        return prepare_conversations(self.data, tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.experiment.model, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the cross entropy of the answers' tokens."""
        return partial(next_token_loss, model, has_segments=True)

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def training_batches(self, corpus: ExampleCorpus[ConversationSplit]) -> ExampleTrainingBatches:
        split = corpus.split("train")
        buckets = bucket_by_rows(
            split.lengths,
            batch_size=self.experiment.batch_size,
            max_buckets=self.data.max_buckets,
        )
        return ExampleTrainingBatches(split, buckets, seed=self.experiment.seed)

    def describe_training_data(self, corpus: ExampleCorpus[ConversationSplit]) -> str:
        split = corpus.split("train")
        counted = int(split.counted.values.sum())
        return (
            f"{split.num_conversations:,} conversations in {len(split.tokens):,} rows, "
            f"{counted:,} tokens of answers"
        )

    def evaluate(
        self,
        engine: Engine,
        params: object,
        corpus: ExampleCorpus[ConversationSplit],
        split: str,
        *,
        full_split: bool,
    ) -> dict[str, float]:
        """Return the loss, in nats a token of the answers, and the perplexity."""
        config, examples = self.experiment.evaluation, corpus.split(split)
        batch_size = config.batch_size or self.experiment.batch_size
        buckets = bucket_by_rows(
            examples.lengths,
            batch_size=round_up_batch_size(batch_size, engine.mesh),
            max_buckets=self.data.max_buckets,
        )
        batches = ExampleEvaluationBatches(
            examples, buckets, max_batches=max_eval_batches(config, full_split)
        )
        loss = mean_losses(engine, params, batches)["loss"]
        return {"loss": loss, "perplexity": perplexity(loss)}

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return the answer to each prompt, written by the chat template as a question."""
        return answer_prompts(run, prompts, options, on_text)


def answer_conversations(
    run: Run,
    conversations: Sequence[Sequence[Message]],
    options: SampleOptions,
    on_text: TextCallback | None = None,
) -> list[str]:
    """Return the assistant's next turn of each conversation.

    Args:
      run: A run whose model is a `LanguageModel`.
      conversations: Messages; the last is not the assistant's.
      options: Length and sampling.
      on_text: Receives the answer to a single conversation in pieces, as it is generated.

    Raises:
      UserError: The template refuses a conversation, or it fills the model's positions.
    """
    tokenizer = tokenizer_of(run)
    template = ChatTemplate.of_tokenizer(tokenizer)
    completions = complete_tokens(
        run,
        [encode_conversation(tokenizer, template, messages) for messages in conversations],
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling,
        seed=options.seed,
        on_text=on_text,
    )
    return [each.text for each in completions]


def encode_conversation(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]
) -> np.ndarray:  # [t] int32
    """Return the tokens of a conversation, to the start of the assistant's next turn.

    Raises:
      UserError: As in `render_question`.
    """
    # The template has written the special tokens as text; encoding adds none of its own.
    return tokenizer.encode_with_special_tokens(render_question(template, messages))[0]


def render_question(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> str:
    """Return the text of a conversation, to the start of the assistant's next turn.

    Raises:
      UserError: The template refuses the conversation, or it ends with an answer.
    """
    if not messages or messages[-1]["role"] == ASSISTANT:
        raise UserError("messages: end with an answer; end them with a question")
    template.check_written(messages, variables)
    return template.render(messages, add_generation_prompt=True, variables=variables)


def answer_prompts(
    run: Run,
    prompts: Sequence[str],
    options: SampleOptions,
    on_text: TextCallback | None = None,
) -> list[str]:
    """Return the assistant's answer to each prompt, a conversation of one question."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return answer_conversations(run, conversations, options, on_text)
