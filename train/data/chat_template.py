"""Chat templates: conversations as text, by the Jinja templates that tokenizers carry.

A template is rendered as `transformers` does (`apply_chat_template`): in a sandbox that can change
nothing, with `messages`, `add_generation_prompt`, the special tokens, `raise_exception` and
`strftime_now`. The text of the assistant is found in one of two ways: by `{% generation %}` blocks
of the template, or by rendering the messages before and with each answer.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from train.errors import UserError

if TYPE_CHECKING:
    import jinja2

    from train.data.tokenizer import Tokenizer

Message = Mapping[str, str]
"""One turn of a conversation: its `role` (`system`, `user`, `assistant`) and its `content`."""

DEFAULT_TEMPLATE = """\
{{- bos_token or eos_token -}}
{%- for message in messages -%}
{{- message['role'] | capitalize + ': ' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- else -%}{{ '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""
"""Template of a tokenizer that has none: `User: ...`, `Assistant: ...` and the end of the text."""

ASSISTANT = "assistant"

# Noncharacters of Unicode, which no text has: edges of a `{% generation %}` block.
_START, _END = "\ufdd0", "\ufdd1"


class ChatText(NamedTuple):
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Ranges of characters that assistants wrote, the end of their turns included."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may write."""

    source: str
    """Jinja source."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Names in the template and their tokens: `eos_token`."""

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, source: str = "") -> ChatTemplate:
        """Return the template of a tokenizer, another one for it, or the default one."""
        names = {token: text for text, token in tokenizer.vocabulary.items()}
        end = names[tokenizer.eos_token_id]
        special = {"eos_token": end} | tokenizer.special_token_names
        return cls(source or tokenizer.chat_template or DEFAULT_TEMPLATE, (*special.items(),))

    @classmethod
    def without_tokenizer(cls, source: str = "") -> ChatTemplate:
        """Return a template, by default the default one, that writes no special tokens."""
        return cls(source or DEFAULT_TEMPLATE, (("eos_token", " "),))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return a conversation as text, without marks of its assistant's parts.

        Args:
          messages: The turns.
          add_generation_prompt: End with the start of an answer.

        Raises:
          UserError: The template is not valid, or refuses the conversation.
        """
        marked = self._render(messages, add_generation_prompt)
        return marked.replace(_START, "").replace(_END, "")

    def render_with_spans(self, messages: Sequence[Message], first: int = 0) -> ChatText:
        """Return a conversation as text, and where assistants wrote it.

        Args:
          messages: The turns.
          first: Answers before this turn are not part of the spans.

        Raises:
          UserError: As in `render`; or the parts cannot be told apart.
        """
        answers = [i for i, each in enumerate(messages) if each["role"] == ASSISTANT]
        counted = [i for i in answers if i >= first]
        marked = self._render(messages, False)
        if _START in marked:
            text, spans = _split_marked(marked)
            return ChatText(text, tuple(spans[len(answers) - len(counted) :]))
        spans = []
        for index in counted:
            before = self.render(messages[:index], add_generation_prompt=True)
            after = self.render(messages[: index + 1])
            if not (after.startswith(before) and marked.startswith(after)):
                raise UserError(
                    f"chat template: formats the turns before message {index} differently once an "
                    "answer follows, so the answer cannot be located; put {% generation %} and {% "
                    "endgeneration %} around it in the template"
                )
            spans.append((len(before), len(after)))
        return ChatText(marked, tuple(spans))

    def end_of_turn(self) -> str:
        """Return the text that ends an assistant's turn."""
        probe = "\ufdd2"
        turns = [{"role": "user", "content": probe}, {"role": ASSISTANT, "content": probe}]
        return self.render(turns).rpartition(probe)[2]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        import jinja2

        try:
            template = _compile(self.source)
            text: str = template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **dict(self.special_tokens),
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"chat template: {reason}; correct it, or name another with data.chat_template"
            ) from error
        return text


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """Return the compiled template."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}` of transformers, with marks at its edges."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            start, end = (
                nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_START, _END)
            )
            return [start, *body, end]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        # Unlike Jinja's, without HTML escapes.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _split_marked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without marks, and the ranges between them."""
    spans: list[tuple[int, int]] = []
    text = ""
    for index, part in enumerate(marked.split(_START)):
        inside, _, after = part.partition(_END) if index else ("", "", part)
        if index:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


class ChatTokens(NamedTuple):
    """A conversation as tokens."""

    tokens: np.ndarray  # [t] int32
    is_completion: np.ndarray  # [t] bool, the tokens that the loss counts


def encode_chat(tokenizer: Tokenizer, chat: ChatText) -> ChatTokens:
    """Return the tokens of a rendered conversation, with those that begin inside a span.

    Special tokens that the text spells out become single tokens, as in `transformers`.
    """
    tokens, starts = tokenizer.encode_with_special_tokens(chat.text)
    counted = np.zeros(len(tokens), bool)
    for start, end in chat.spans:
        counted |= (starts >= start) & (starts < end)
    return ChatTokens(tokens, counted)


def end_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text of a model, an answer or not.

    They are those of the model's files and the one that its chat template writes after an answer.
    """
    if not tokenizer.chat_template:
        return tokenizer.end_token_ids
    try:
        text = ChatTemplate.of_tokenizer(tokenizer).end_of_turn()
    except UserError:  # the template wants other turns than a question and an answer
        return tokenizer.end_token_ids
    tokens = tokenizer.encode_with_special_tokens(text)[0].tolist()
    written = [token for token in tokens if token in tokenizer.control_token_ids]
    return tuple(dict.fromkeys([*tokenizer.end_token_ids, *written[:1]]))
