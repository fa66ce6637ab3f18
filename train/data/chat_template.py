"""Chat templates: conversations as text, by the Jinja templates that tokenizers carry.

A template is rendered as `transformers` does (`apply_chat_template`): in a sandbox that can change
nothing, with `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens,
`raise_exception` and `strftime_now`. The text of the assistant is found in one of two ways: by
`{% generation %}` blocks of the template, or by rendering the messages before and with each answer.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from train.data.tokenizer import Tokenizer
from train.errors import UserError

Message = Mapping[str, Any]
"""One turn of a conversation: its `role` (`system`, `user`, `assistant`, `tool`) and its `content`,
with other fields for the template (`tool_calls`, `reasoning_content`, `name`). Values of JSON."""

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. A template finds it under the first two."""

WRITTEN_FIELDS = (("tool_calls",), ("function_call",), REASONING)
"""Fields of a message, each by its names, that are a part of what the assistant writes."""

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

# Noncharacters of Unicode, which no text has: edges of a `{% generation %}` block, and an answer.
_START, _END, _PROBE = "\ufdd0", "\ufdd1", "\ufdd2"


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

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return a conversation as text, without marks of its assistant's parts.

        Args:
          messages: The turns.
          add_generation_prompt: End with the start of an answer.
          variables: `tools`, `documents` and other variables of the template.

        Raises:
          UserError: The template is not valid, or refuses the conversation.
        """
        text = self._render(messages, variables, add_generation_prompt=add_generation_prompt)
        return text.replace(_START, "").replace(_END, "")

    def render_with_spans(
        self,
        messages: Sequence[Message],
        first: int = 0,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> ChatText:
        """Return a conversation as text, and where assistants wrote it.

        Args:
          messages: The turns. The spans have no answer whose `weight` is 0 or whose `train` is
            False.
          first: Answers before this turn are not part of the spans.
          variables: As in `render`.

        Raises:
          UserError: As in `render`; or the parts cannot be told apart.
        """
        answers = [i for i, each in enumerate(messages) if each["role"] == ASSISTANT]
        counted = [i for i in answers if i >= first and is_learned(messages[i])]
        marked = self._render(messages, variables)
        text, marks = _split_marked(marked)
        if not counted:
            return ChatText(text, ())
        if "endgeneration" in self.source:
            if len(marks) == len(answers):
                marks = [marks[answers.index(i)] for i in counted]
            elif counted != answers:
                raise UserError(
                    f"chat template: writes {len(marks)} generation blocks for {len(answers)} "
                    "answers, so that those which are not learned cannot be told apart; write one "
                    "around each"
                )
            return ChatText(text, tuple(marks))
        spans = []
        for index in counted:
            before = self._render(messages[:index], variables, add_generation_prompt=True)
            after = self._render(messages[: index + 1], variables)
            if after.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
            else:
                spans.append(self._locate(messages, index, text, before, variables))
        return ChatText(text, tuple(spans))

    def _locate(
        self,
        messages: Sequence[Message],
        index: int,
        text: str,
        before: str,
        variables: Mapping[str, Any],
    ) -> tuple[int, int]:
        """Return where an answer stands whose turn is written otherwise once others follow.

        Qwen3 leaves out the reasoning of earlier turns, say. The text with another answer in this
        place is the same up to the answer and after it.
        """
        probe = {"role": ASSISTANT, "content": _PROBE}
        changed = self._render([*messages[:index], probe, *messages[index + 1 :]], variables)
        last = self._render([*messages[:index], probe], variables)
        start = _common_length(text, changed)
        stop = len(text) - _common_length(text[::-1], changed[::-1])
        end_of_turn = last.rpartition(_PROBE)[2]
        if _PROBE not in changed or stop < start or not text.startswith(end_of_turn, stop):
            raise UserError(
                f"chat template: formats message {index} or the turns before it differently once "
                "others follow, so the answer cannot be located; put {% generation %} and {% "
                "endgeneration %} around it in the template"
            )
        start = len(before) if text.startswith(before) else start
        return start, stop + len(end_of_turn)

    def check_written(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES
    ) -> None:
        """Raise UserError if the template leaves out variables, or a part of an answer."""
        for name in variables:
            if name not in self.source:
                raise UserError(
                    f"chat template: does not read {name}; leave {name} out, or give a template "
                    "that has it with data.chat_template"
                )
        answers = [each for each in messages if each["role"] == ASSISTANT]
        for names in WRITTEN_FIELDS:
            given = [name for each in answers for name in names if each.get(name)]
            without = [
                {"content": ""} | {name: value for name, value in each.items() if name not in names}
                for each in messages
            ]
            if given and self._render(messages, variables) == self._render(without, variables):
                raise UserError(
                    f"chat template: writes nothing of {given[0]}; leave it out, or give a "
                    "template that writes it with data.chat_template"
                )

    def end_of_turn(self) -> str:
        """Return the text that ends an assistant's turn."""
        turns = [{"role": "user", "content": _PROBE}, {"role": ASSISTANT, "content": _PROBE}]
        return self.render(turns).rpartition(_PROBE)[2]

    def _render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        values = {"tools": None, "documents": None, **dict(self.special_tokens), **variables}
        values["messages"] = [_as_template_reads(each) for each in messages]
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return _compile(self.source).render(values)
        except Exception as error:  # a template can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"chat template: {reason[:1000]}; correct it, or name another with "
                "data.chat_template"
            ) from error


class _Generation(Extension):
    """The block `{% generation %}` of transformers, with marks at its edges."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_START, _END)
        )
        return [start, *body, end]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, **options: Any) -> str:
    """Return JSON; unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def is_learned(message: Message) -> bool:
    """Return True for an answer that counts in the loss."""
    is_off = message.get("weight", 1) == 0 or message.get("train", 1) == 0  # False is 0
    return message["role"] == ASSISTANT and not is_off


def _as_template_reads(message: Message) -> dict[str, Any]:
    """Return a message without nulls, and with its reasoning under both names, as transformers."""
    fields = {name: value for name, value in message.items() if value is not None}
    if reasoning := next((fields[name] for name in REASONING if name in fields), None):
        fields = {"thinking": reasoning} | fields | {"reasoning_content": reasoning}
    return fields


def _common_length(a: str, b: str) -> int:
    """Return the number of characters with which both texts begin."""
    differs = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


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
