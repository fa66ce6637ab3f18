"""Chat templates: conversations as text, by the Jinja templates that tokenizers carry.

A template is rendered as `transformers` does (`apply_chat_template`): in a sandbox that can change
nothing, with `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens,
`raise_exception` and `strftime_now`; and in a process whose time and memory are limited. The text
of the assistant is found in one of two ways: by `{% generation %}` blocks of the template, or by
rendering the messages before and with each answer.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from train.data import template_process
from train.data.template_process import END, MAX_SECONDS, START
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

MAX_TEMPLATE = 1_000_000
"""Characters of a template. Published ones have up to 20,000."""

MAX_TEXTS = 16
"""Texts of a request: all beginnings of a long conversation exceed the memory of the process."""

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

# Another noncharacter of Unicode: stands for an answer.
_PROBE = "\ufdd2"


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
          UserError: The template is not valid, refuses the conversation, or exceeds its limits.
        """
        [text] = self._render([(messages, add_generation_prompt)], variables)
        return text.replace(START, "").replace(END, "")

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
        cuts: list[tuple[Sequence[Message], bool]] = [(messages, False)]
        if "endgeneration" not in self.source:
            for i in counted:
                cuts += [(messages[:i], True), (messages[: i + 1], False)]
        marked, *texts = self._render(cuts, variables)
        text, marks = _split_marked(marked)
        if not counted:
            return ChatText(text, ())
        if not texts:
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
        for index, before, after in zip(counted, texts[::2], texts[1::2], strict=True):
            if after.startswith(before) and marked.startswith(after):
                spans.append((len(before), len(after)))
            else:
                spans.append(self._locate(messages, index, marked, before, variables))
        return ChatText(marked, tuple(spans))

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
        changed, last = self._render(
            [
                ([*messages[:index], probe, *messages[index + 1 :]], False),
                ([*messages[:index], probe], False),
            ],
            variables,
        )
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
        for names in WRITTEN_FIELDS:
            given = [
                (index, name)
                for index, message in enumerate(messages)
                if message["role"] == ASSISTANT
                for name in names
                if message.get(name)
            ]
            if not given:
                continue
            index, name = given[-1]  # shows it for all: trying each takes quadratic time
            others = {key: value for key, value in messages[index].items() if key not in names}
            text, text_without = self._render(
                [
                    (messages[: index + 1], False),
                    ([*messages[:index], {"content": ""} | others], False),
                ],
                variables,
            )
            if text == text_without:
                raise UserError(
                    f"chat template: writes nothing of {name} in message {index}; leave "
                    "it out, or give a template that writes it with data.chat_template"
                )

    def writes(
        self, field: str, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES
    ) -> bool:
        """Return True if a field of the messages changes the text."""
        others = [{key: value for key, value in each.items() if key != field} for each in messages]
        text, text_without = self._render([(messages, False), (others, False)], variables)
        return text != text_without

    def end_of_turn(self) -> str:
        """Return the text that ends an assistant's turn."""
        turns = [{"role": "user", "content": _PROBE}, {"role": ASSISTANT, "content": _PROBE}]
        return self.render(turns).rpartition(_PROBE)[2]

    def _render(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], variables: Mapping[str, Any]
    ) -> list[str]:
        """Return the text of each pair of messages and `add_generation_prompt`."""
        if len(self.source) > MAX_TEMPLATE:
            raise UserError(
                f"chat template: has {len(self.source):,} characters, more than {MAX_TEMPLATE:,}; "
                "name another with data.chat_template"
            )
        common = {"tools": None, "documents": None, **dict(self.special_tokens), **variables}
        texts: list[str] = []
        for start in range(0, len(conversations), MAX_TEXTS):
            request = {
                "source": self.source,
                "variables": [
                    common
                    | {
                        "messages": [_as_template_reads(each) for each in messages],
                        "add_generation_prompt": add_generation_prompt,
                    }
                    for messages, add_generation_prompt in conversations[start : start + MAX_TEXTS]
                ],
            }
            answer = _process.ask(request)
            if "error" in answer:
                raise UserError(
                    f"chat template: {answer['error']}; correct it, or name another with "
                    "data.chat_template"
                )
            texts += answer["texts"]
        return texts


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


class _TemplateProcess:
    """The process that renders templates, shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request (`train.data.template_process`)."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages: are not values of JSON ({error}); correct them") from error
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
                answer: dict[str, Any] = json.loads(reply)
            except (BrokenPipeError, json.JSONDecodeError):
                self.stop()
                return {"error": f"needs more than {MAX_SECONDS} seconds, or ends its process"}
            except BaseException:  # an interrupt: the answer would be taken for the next one's
                self.stop()
                raise
        return answer

    def stop(self) -> None:
        """End the process. The next request starts another."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError), self._process:
                self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", template_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        return self._process


_process = _TemplateProcess()
atexit.register(_process.stop)


def _common_length(a: str, b: str) -> int:
    """Return the number of characters with which both texts begin."""
    differs = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


def _split_marked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without marks, and the ranges between them."""
    spans: list[tuple[int, int]] = []
    text = ""
    for index, part in enumerate(marked.split(START)):
        inside, _, after = part.partition(END) if index else ("", "", part)
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
