"""`sample W --chat`: talk to a language model through its chat template."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from train.data.chat_template import Message
    from train.run import Run
    from train.tasks.task import SampleOptions


def answer_once(
    run: "Run",
    prompts: list[str],
    options: "SampleOptions",
    on_text: Callable[[str], None] | None,
) -> list[str]:
    """Return the answer to each prompt.

    Raises:
      UserError: The run has no language model.
    """
    from train.tasks.chat import answer_prompts

    check_can_chat(run)
    return answer_prompts(run, prompts, options, on_text)


def chat(run: "Run", options: "SampleOptions", questions: Iterable[str] | None = None) -> None:
    """Answer questions one after the other, each with the conversation so far in view.

    Args:
      run: The run.
      options: Length and sampling.
      questions: Lines of text; default: those of standard input, with a prompt at a terminal. An
        empty line begins a new conversation.
    """
    from train.tasks.chat import answer_conversations

    check_can_chat(run)
    messages: list[Message] = []
    for question in read_questions() if questions is None else questions:
        if not question.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": question.strip()})
        answers = answer_conversations(run, [messages], options, _print_piece)
        print(flush=True)
        messages.append({"role": "assistant", "content": answers[0].strip()})


def read_questions() -> Iterable[str]:
    """Yield the lines of standard input to its end."""
    at_terminal = sys.stdin.isatty()
    while True:
        if at_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def check_can_chat(run: "Run") -> None:
    """Raise UserError for a run without a language model."""
    from transformer.models.language_model import LanguageModel

    if not isinstance(run.model, LanguageModel) or run.tokenizer is None:
        kind = type(run.experiment.task).__name__
        raise UserError(f"sample --chat: task {kind} has no language model; leave --chat out")


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)
