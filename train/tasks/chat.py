"""Answers of a chat model: render the conversation, generate to the end of the turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.data.chat_template import ASSISTANT, ChatTemplate, Message, stop_token
from train.errors import UserError
from train.tasks.task import SampleOptions, TextCallback
from train.tasks.text_completion import complete_tokens
from train.tasks.vocabulary import tokenizer_of

if TYPE_CHECKING:
    from train.run import Run


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
    rows = []
    for messages in conversations:
        if not messages or messages[-1]["role"] == ASSISTANT:
            raise UserError("messages: end with an answer; end them with a question")
        text = template.render(messages, add_generation_prompt=True)
        rows.append(tokenizer.encode_with_special_tokens(text)[0])
    return complete_tokens(
        run,
        rows,
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling,
        seed=options.seed,
        on_text=on_text,
        stop_token=stop_token(tokenizer, template),
    )


def answer_prompts(
    run: Run,
    prompts: Sequence[str],
    options: SampleOptions,
    on_text: TextCallback | None = None,
) -> list[str]:
    """Return the assistant's answer to each prompt, a conversation of one question."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return answer_conversations(run, conversations, options, on_text)
