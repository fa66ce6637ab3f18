"""Instruction tuning: predict the answers of conversations, given all before them."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from train.data.chat_template import ASSISTANT, NO_VARIABLES, ChatTemplate, Message
from train.data.conversations import (
    ConversationDataConfig,
    ConversationSplit,
    prepare_conversations,
)
from train.data.examples import ExampleCorpus
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.step import LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses, perplexity
from train.tasks.example_task import ExampleTask
from train.tasks.task import (
    GENERATION_OPTIONS,
    SampleOptions,
    TaskConfig,
    TrainedModel,
    check_no_encoder,
    tokenizer_of,
)
from train.tasks.text_completion import complete_texts
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.losses import next_token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class InstructionTuning(TaskConfig):
    """Instruction tuning: predict the answers of conversations."""

    data_configs = (ConversationDataConfig,)

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)


@dataclasses.dataclass(frozen=True)
class InstructionTask(ExampleTask):
    """Instruction tuning. The best checkpoint is the one with the lowest loss of the answers."""

    data: ConversationDataConfig

    @property
    def supported_options(self) -> tuple[str, ...]:
        return GENERATION_OPTIONS

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[ConversationSplit]:
        return prepare_conversations(self.data, tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.model_config, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the cross entropy of the answers' tokens."""
        return partial(next_token_loss, model, has_segments=True)

    def describe_training_data(self, corpus: ExampleCorpus[ConversationSplit]) -> str:
        split = corpus.split("train")
        counted = int(split.counted.values.sum())
        return (
            f"{split.num_conversations:,} conversations in {len(split.tokens):,} rows, "
            f"{counted:,} tokens of answers"
        )

    def evaluate(
        self,
        model: EvaluatedModel,
        corpus: ExampleCorpus[ConversationSplit],
        split: str,
        options: EvaluationOptions,
    ) -> dict[str, float]:
        """Return the loss, in nats a token of the answers, and the perplexity."""
        loss = mean_losses(model, self.evaluation_batches(corpus, split, options))["loss"]
        return {"loss": loss, "perplexity": perplexity(loss)}

    def sample(
        self, trained: TrainedModel, prompts: Sequence[str], options: SampleOptions
    ) -> list[str]:
        """Return the answer to each prompt, written by the chat template as a question."""
        return answer_prompts(trained, prompts, options)


def answer_conversations(
    trained: TrainedModel, conversations: Sequence[Sequence[Message]], options: SampleOptions
) -> list[str]:
    """Return the assistant's next turn of each conversation.

    Raises:
      UserError: The template refuses a conversation, or it fills the model's positions.
    """
    tokenizer = tokenizer_of(trained)
    template = ChatTemplate.of_tokenizer(tokenizer)
    rows = [encode_conversation(tokenizer, template, messages) for messages in conversations]
    return complete_texts(trained, rows, options)


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
    trained: TrainedModel, prompts: Sequence[str], options: SampleOptions
) -> list[str]:
    """Return the assistant's answer to each prompt, a conversation of one question."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return answer_conversations(trained, conversations, options)
