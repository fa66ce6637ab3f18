"""Instruction data: conversations, and rows of them with the loss on the answers.

A conversation is recognized by its fields:

- `messages`, as of OpenAI's API: objects with role and content;
- `conversations`, as of ShareGPT: objects with from and value;
- `instruction` (`input`) and `output`, as of Alpaca, or another question and answer: two messages;
- `prompt` and `completion`: both texts, or both lists of messages.

Messages are written by the chat template; texts are joined as they are, and end with the
end-of-text token. Several conversations share a row; none sees another.
"""

import bisect
import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.chat_template import (
    ASSISTANT,
    NO_VARIABLES,
    WRITTEN_FIELDS,
    ChatTemplate,
    ChatTokens,
    Message,
    encode_chat,
)
from train.data.data_config import TokenizerConfig
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    encode_splits,
    read_splits,
    tokenizer_for_splits,
)
from train.data.files import find_file
from train.data.text_files import read_lines
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from transformer.validation import Bounds, Mark


def require_ends_of_turns(tokenizer: TokenizerConfig) -> None:
    """Raise UsageError for tokens that are words: `Yes.<eos>User:` would be one."""
    if tokenizer.kind == "word":
        raise UsageError(
            "data.tokenizer.kind: word cannot tell the end of an answer from its last word; choose "
            "bpe, or file with the tokenizer of a model"
        )


@dataclasses.dataclass(frozen=True)
class ConversationDataConfig(ExampleDataConfig):
    """Conversations in rows, for instruction tuning.

    A row has `messages`, a list of {"role", "content"}; or `prompt` and `completion`, both texts
    or both lists of messages.
    """

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 512
    """Tokens of a row. Longer conversations are cut at their ends; their number is reported."""

    packing: bool = True
    """Put several conversations into a row. None attends to another."""

    chat_template: str = ""
    """File with a Jinja template. Empty: the template of the tokenizer, or a plain default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ends_of_turns(self.tokenizer)


LISTS = ("messages", "conversations", "conversation")
"""Fields with all messages of a conversation."""

QUESTIONS, ANSWERS = (
    ("instruction", "question", "query", "prompt"),
    ("output", "response", "answer"),
)
"""Fields of a question and of its answer."""

SYSTEM, INPUTS = ("system", "system_prompt"), ("input", "context")
"""Fields of the system's message before a question, and of a text after it."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by the names that `from` has."""

VARIABLES = ("tools", "documents", "chat_template_kwargs")
"""Fields of variables of the chat template; the last holds several."""

UNSUPPORTED = {"functions": "tools", "function_call": "tool_calls"}
"""Older fields of OpenAI's API, and those that have taken their place."""


REMEDY = (
    "give messages, conversations, question and answer, prompt and completion, or instruction and "
    "output; "
    "docs/tasks.md#conversations shows the formats"
)


class Conversation(NamedTuple):
    """One example: messages, or a text and its completion."""

    prompt: str | tuple[Message, ...]
    """Text; or messages. Answers among the messages count in the loss unless there is a completion
    of its own."""
    completion: str | tuple[Message, ...] = ()
    variables: Mapping[str, Any] = NO_VARIABLES
    """`tools` and other variables of the chat template."""
    location: str = ""
    unread: tuple[str, ...] = ()
    """Other fields of the row."""

    @property
    def content(self) -> tuple[Any, ...]:
        """What is learned from, without the location: JSON values."""
        return self.prompt, self.completion, dict(self.variables)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages; none of a text."""
        if isinstance(self.prompt, str) or isinstance(self.completion, str):
            return ()
        return (*self.prompt, *self.completion)

    def text(self, template: ChatTemplate) -> str:
        """Return what a template writes, to train a tokenizer on."""
        if isinstance(self.prompt, str):
            return f"{self.prompt} {self.completion}"
        with _located(self.location):
            return template.render(self.messages, variables=self.variables)


def parse_conversation(location: str, row: Any) -> Conversation:
    """Return the conversation of a row.

    Raises:
      UserError: It has no fields of a conversation, or they are malformed or not supported.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{location}: is not an object; {REMEDY}")
    row = {name: value for name, value in row.items() if value is not None}
    _check_supported(location, row)

    def first_of(names: Sequence[str]) -> str:
        return next((name for name in names if name in row), "")

    completion: str | tuple[Message, ...] = ()
    question, answer, system = map(first_of, (QUESTIONS, ANSWERS, SYSTEM))
    if name := first_of(LISTS):
        read = [name, *VARIABLES]
        prompt: str | tuple[Message, ...] = parse_messages(location, name, row[name])
    elif "prompt" in row and "completion" in row:
        read = ["prompt", "completion"]
        prompt, completion = (
            row[name] if isinstance(row[name], str) else parse_messages(location, name, row[name])
            for name in ("prompt", "completion")
        )
        if isinstance(prompt, str) != isinstance(completion, str):
            raise UserError(
                f"{location}: one of prompt and completion is a text and the other a list of "
                "messages; give two of a kind"
            )
        read += () if isinstance(prompt, str) else VARIABLES
    elif question and answer:
        addition = first_of(INPUTS)
        read = [question, addition, answer, *VARIABLES]
        prompt = (
            _text_message(location, row, "user", question, addition),
            _text_message(location, row, ASSISTANT, answer),
        )
    else:
        has = ", ".join(map(str, row)) or "none"
        raise UserError(f"{location}: has no fields of a conversation (it has {has}); {REMEDY}")
    if system and not isinstance(prompt, str) and prompt[0]["role"] != "system":
        read.append(system)
        if row[system]:
            prompt = (_text_message(location, row, "system", system), *prompt)
    variables = parse_variables(location, row)
    unread = tuple(str(name) for name in row if name not in read)
    return Conversation(prompt, completion, variables, location, unread)


def _text_message(location: str, row: Mapping[str, Any], role: str, *names: str) -> Message:
    """Return a message of the texts in some fields, a line each."""
    texts = []
    for name in filter(None, names):
        if not isinstance(row[name], str):
            raise UserError(f"{location}: {name} is not a text; give one")
        texts.append(row[name])
    return {"role": role, "content": "\n".join(filter(None, texts))}


def parse_variables(location: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the template that a row has. Empty ones count as missing."""
    variables: dict[str, Any] = {}
    for name in VARIABLES:
        value, kind = row.get(name), dict if name == "chat_template_kwargs" else list
        if isinstance(value, str):  # tables of columns hold nested values as JSON
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value or "null")
        if not value:
            continue
        if not isinstance(value, kind):
            expected = "an object" if kind is dict else "a list"
            raise UserError(f"{location}: {name} is not {expected}; give one")
        variables |= value if isinstance(value, dict) else {name: value}
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            raise UserError(f"{location}: chat_template_kwargs has {name}; leave it out")
    return variables


def _check_supported(location: str, fields: Mapping[str, Any]) -> None:
    for name, other in UNSUPPORTED.items():
        if fields.get(name):
            raise UserError(f"{location}: {name} is not supported; give {other} in its place")


def parse_messages(location: str, name: str, value: Any) -> tuple[Message, ...]:
    """Return messages with their fields: a role, a text as content, and others.

    Raises:
      UserError: It is not a list of such messages, or a field is not supported.
    """
    if not isinstance(value, list | tuple) or not value:
        raise UserError(
            f"{location}: {name} is not a list of messages; give objects with role and content"
        )
    return tuple(
        parse_message(f"{location}: {name}[{number}]", each) for number, each in enumerate(value)
    )


def parse_message(location: str, value: Any) -> Message:
    """Return a message without the fields that are null, with parts of its content joined.

    An answer may have another field in place of the content, such as `tool_calls`.

    Raises:
      UserError: It has no role or no text, or a field that is not supported.
    """
    given = value if isinstance(value, Mapping) else {}
    fields = {name: each for name, each in given.items() if each is not None}
    if "from" in fields and "role" not in fields:
        speaker = fields.pop("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise UserError(
                f"{location} is from {speaker!r}, which is no known role; give one of "
                f"{', '.join(ROLES)}"
            )
        fields = {"role": ROLES[speaker]} | fields
    if "value" in fields and "content" not in fields:
        fields["content"] = fields.pop("value")
    if not isinstance(fields.get("role"), str):
        raise UserError(f"{location} has no text 'role'; give one")
    _check_supported(location, fields)
    is_answer = fields["role"] == ASSISTANT
    content = fields.get("content")
    if isinstance(content, list | tuple):
        content = fields["content"] = "".join(_text_of(location, part) for part in content)
    has_other = any(fields.get(name) for names in WRITTEN_FIELDS for name in names)
    if not isinstance(content, str) and not (content is None and is_answer and has_other):
        raise UserError(f"{location} has no text 'content'; give one")
    for name, allowed in (("weight", (0, 1)), ("train", (False, True))):
        if name in fields and fields[name] not in allowed:
            raise UserError(
                f"{location} has {name} {fields[name]!r}; give {allowed[0]} or {allowed[1]}"
            )
        if fields.get(name) and not is_answer:
            raise UserError(f"{location} has {name}, and only answers are learned; leave it out")
    return fields


def _text_of(location: str, part: Any) -> str:
    """Return the text of a part of a message's content."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise UserError(f"{location} has a part {kind!r} that is not text; leave it out")


def encode_conversation(
    tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation
) -> ChatTokens:
    """Return the tokens of a conversation, and which of them the loss counts.

    A text begins as generation from a text does, and ends with the end-of-text token.
    """
    prompt, completion = conversation.prompt, conversation.completion
    if isinstance(prompt, str):
        assert isinstance(completion, str)
        before = np.append(tokenizer.text_frame[0], tokenizer.encode(prompt))
        after = np.append(tokenizer.encode(completion), tokenizer.eos_token_id)
        counted = np.arange(len(before) + len(after)) >= len(before)
        return ChatTokens(np.concatenate([before, after]).astype(np.int32), counted)
    messages, variables = conversation.messages, conversation.variables
    with _located(conversation.location):
        template.check_written(messages, variables)
        first = len(prompt) if completion else 0
        return encode_chat(tokenizer, template.render_with_spans(messages, first, variables))


@contextlib.contextmanager
def _located(location: str) -> Iterator[None]:
    """Put a location before errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{location}: {error}") from error


def notes_on_fields(template: ChatTemplate, conversations: Iterable[Conversation]) -> Iterator[str]:
    """Yield notes on fields of rows that are not read, and of messages that are not written."""
    unread: dict[str, None] = {}
    in_messages: dict[str, None] = {}
    for each in conversations:
        unread |= dict.fromkeys(each.unread)
        in_messages |= dict.fromkeys(itertools.chain.from_iterable(each.messages))
    if unread:
        yield f"fields of rows that are not read: {', '.join(unread)}"
    known = ("weight", "train", *itertools.chain.from_iterable(WRITTEN_FIELDS))
    unwritten = [
        name
        for name in in_messages
        if name not in known and not re.search(rf"\b{re.escape(name)}\b", template.source)
    ]
    if unwritten:
        yield f"fields of messages that the chat template does not name: {', '.join(unwritten)}"


@dataclasses.dataclass(frozen=True, eq=False)
class ConversationSplit:
    """Rows of one or more conversations."""

    tokens: RaggedArray
    targets: RaggedArray
    counted: RaggedArray
    """1 for each target in the loss."""
    segments: RaggedArray
    """Number of the conversation in its row, from 1."""
    positions: RaggedArray
    num_conversations: int

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[ChatTokens]]) -> Self:
        """Return the split of these rows. The last token of each conversation is only a target."""

        def joined(part: Callable[[int, ChatTokens], np.ndarray]) -> RaggedArray:
            return RaggedArray.from_sequences(
                [
                    np.concatenate([part(number, each) for number, each in enumerate(row, start=1)])
                    for row in rows
                ]
            )

        return cls(
            tokens=joined(lambda _, each: each.tokens[:-1]),
            targets=joined(lambda _, each: each.tokens[1:]),
            counted=joined(lambda _, each: each.is_completion[1:]),
            segments=joined(lambda number, each: np.full(len(each.tokens) - 1, number)),
            positions=joined(lambda _, each: np.arange(len(each.tokens) - 1)),
            num_conversations=sum(map(len, rows)),
        )

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Number of tokens of each row."""
        return self.tokens.lengths[:, None]

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some rows, padded to T tokens.

        Returns:
          tokens, targets: [B, T] int32, the tokens and the next tokens.
          weights: [B, T] float32, 1 for each target of an answer.
          segments: [B, T] int32, number of the conversation, from 1; 0 is padding.
          positions: [B, T] int32, position within the conversation.
          examples: [B] uint32, the indices of the rows within the split.
        """
        fields = ("tokens", "targets", "segments", "positions")
        batch = {name: getattr(self, name).pad(indices, lengths[0])[0] for name in fields}
        weights = self.counted.pad(indices, lengths[0])[0].astype(np.float32)
        return batch | {"weights": weights, "examples": example_ids(np.maximum(indices, 0))}


def prepare_conversations(
    config: ConversationDataConfig, tokenizer: Tokenizer | None = None
) -> ExampleCorpus[ConversationSplit]:
    """Read, render and tokenize the conversations that `config` names.

    A `tokenizer` takes the place of the one that `config.tokenizer` describes.

    Raises:
      UserError: A file is missing or malformed, the template is not valid, or nothing is left to
        learn from.
    """
    splits = read_splits(config, parse_conversation)
    used, template = prepare_template(config, config.chat_template, tokenizer, splits)
    splits.notes += notes_on_fields(template, itertools.chain.from_iterable(splits.values()))
    return encode_splits(
        splits,
        used,
        lambda split, each: _encode(split, each, used, template, config, splits.notes),
        content=lambda conversation: conversation.content,
        identity={"template": template.source},
    )


def prepare_template(
    config: ExampleDataConfig,
    path: str,
    tokenizer: Tokenizer | None,
    conversations: Mapping[str, Iterable[Conversation]],
) -> tuple[Tokenizer, ChatTemplate]:
    """Return the tokenizer with its chat template.

    It is of a file, of the tokenizer, or the default one; a tokenizer is trained if none is given.
    """
    untrained = ChatTemplate.without_tokenizer(read_template(path))
    texts = {
        split: (each.text(untrained) for each in of_split)
        for split, of_split in conversations.items()
    }
    tokenizer = with_template(tokenizer or tokenizer_for_splits(config.tokenizer, texts), path)
    return tokenizer, ChatTemplate.of_tokenizer(tokenizer)


def read_template(path: str) -> str:
    """Return the text of a template's file; empty without one."""
    return "\n".join(read_lines(find_file(path, "data.chat_template"))) if path else ""


def with_template(tokenizer: Tokenizer, path: str) -> Tokenizer:
    """Return the tokenizer with a chat template: of a file, its own, or the default one."""
    template = ChatTemplate.of_tokenizer(tokenizer, read_template(path))
    template.render([{"role": "user", "content": "?"}], add_generation_prompt=True)
    return tokenizer.with_chat_template(template.source)


def _encode(
    name: str,
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: ConversationDataConfig,
    notes: list[str],
) -> ConversationSplit:
    """Tokenize and pack a split. Notes on cut and dropped conversations are appended to `notes`."""
    encoded = [encode_conversation(tokenizer, template, each) for each in conversations]
    limit = config.max_length
    num_cut = sum(len(each.tokens) > limit + 1 for each in encoded)
    cut = [
        ChatTokens(each.tokens[: limit + 1], each.is_completion[: limit + 1]) for each in encoded
    ]
    # The first token has nothing to be predicted from.
    kept = [each for each in cut if each.is_completion[1:].any()]
    if num_cut:
        notes.append(
            f"the {name} split: {num_cut:,} of {len(encoded):,} conversations are longer than "
            f"data.max_length {limit} tokens and are cut at their ends"
        )
    if dropped := len(cut) - len(kept):
        notes.append(
            f"the {name} split: {dropped:,} of {len(encoded):,} conversations have no answer to "
            "learn in their first data.max_length tokens and are left out"
        )
    if not kept:
        raise UserError(
            f"the {name} split: has no answers of an assistant; give completions, or raise "
            f"data.max_length {limit}"
        )
    lengths = [len(each.tokens) - 1 for each in kept]
    rows = pack(lengths, limit) if config.packing else [[i] for i in range(len(kept))]
    return ConversationSplit.of_rows([[kept[i] for i in row] for row in rows])


def pack(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return groups of indices whose lengths sum to at most `limit`: best fit, longest first."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens and number of each row, ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place == len(room):
            rows.append([])
            free, row = limit, len(rows) - 1
        else:
            free, row = room.pop(place)
        rows[row].append(index)
        bisect.insort(room, (free - lengths[index], row))
    return rows
