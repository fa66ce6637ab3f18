"""Instruction data: conversations in JSON lines, and rows of them with the loss on the answers.

A line has `messages` (a list of {"role", "content"}), or `prompt` and `completion`: both texts, or
both lists of messages. Messages are written by the chat template; texts are joined as they are, and
end with the end-of-text token. Several conversations share a row; none sees another.
"""

import bisect
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.chat_template import (
    ChatTemplate,
    ChatTokens,
    Message,
    encode_chat,
)
from train.data.example_configs import ConversationDataConfig
from train.data.examples import ExampleCorpus, corpus_digest, read_splits, tokenizer_for_splits
from train.data.files import find_file
from train.data.text_files import check_unicode, line_location, read_lines
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UserError, as_user_error


class Conversation(NamedTuple):
    """One example: messages, or a text and its completion."""

    prompt: str | tuple[Message, ...]
    """Text; or messages. Answers among the messages count in the loss unless there is a completion
    of its own."""
    completion: str | tuple[Message, ...] = ()
    location: str = ""

    def text(self, template: ChatTemplate) -> str:
        """Return what a template writes, to train a tokenizer on."""
        if isinstance(self.prompt, str):
            return f"{self.prompt} {self.completion}"
        assert not isinstance(self.completion, str)  # a text completes a text
        return template.render([*self.prompt, *self.completion])


def read_json_objects(setting: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the object of each line of a file that is not empty."""
    file = find_file(path, setting)
    for index, line in enumerate(read_lines(file)):
        if not line.strip():
            continue
        location = line_location(file, index)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{location}: not JSON ({error}); each line must be one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{location}: not a JSON object; each line must be one")
        yield location, record


def parse_conversation(location: str, record: Any) -> Conversation:
    """Return the conversation of a JSON object.

    Raises:
      UserError: It has neither `messages` nor `prompt` and `completion`, or they are malformed.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{location}: is not an object; give messages, or prompt and completion")
    if record.get("tools"):
        raise UserError(f"{location}: has tools, which are not supported; leave the line out")
    if "messages" in record:
        return Conversation(parse_messages(location, "messages", record["messages"]), (), location)
    for name in ("prompt", "completion"):
        if name not in record:
            has = ", ".join(map(str, record)) or "none"
            raise UserError(
                f"{location}: has no field {name!r} (it has {has}); give messages, or prompt and "
                "completion"
            )
    prompt, completion = (
        parse_part(location, name, record[name]) for name in ("prompt", "completion")
    )
    if isinstance(prompt, str) != isinstance(completion, str):
        raise UserError(
            f"{location}: one of prompt and completion is a text and the other a list of "
            "messages; give two of a kind"
        )
    return Conversation(prompt, completion, location)


def parse_part(location: str, name: str, value: Any) -> str | tuple[Message, ...]:
    """Return a text or messages."""
    if isinstance(value, str):
        check_unicode(location, name, value)
        return value
    return parse_messages(location, name, value)


def parse_messages(location: str, name: str, value: Any) -> tuple[Message, ...]:
    """Return messages with a role and a content each."""
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{location}: {name} is not a list of messages; give objects with role and content"
        )
    for number, each in enumerate(value):
        fields = each if isinstance(each, dict) else {}
        for field in ("role", "content"):
            if not isinstance(fields.get(field), str):
                raise UserError(f"{location}: {name}[{number}] has no text {field!r}; give one")
            check_unicode(location, f"{name}[{number}]", fields[field])
    return tuple({"role": each["role"], "content": each["content"]} for each in value)


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
    messages = (*prompt, *completion)
    with as_user_error(conversation.location):
        first = len(prompt) if completion else 0
        return encode_chat(tokenizer, template.render_with_spans(messages, first))


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

    Args:
      config: Files, template and tokenizer.
      tokenizer: Used instead of the one that `config.tokenizer` describes.

    Raises:
      UserError: A file is missing or malformed, the template is not valid, or nothing is left to
        learn from.
    """

    def read(setting: str, path: str) -> list[Conversation]:
        return [parse_conversation(*each) for each in read_json_objects(setting, path)]

    splits = read_splits(config, read, parse_conversation)
    untrained = ChatTemplate.without_tokenizer(read_template(config.chat_template))
    tokenizer = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {name: (each.text(untrained) for each in examples) for name, examples in splits.items()},
    )
    tokenizer = with_template(tokenizer, config.chat_template)
    template = ChatTemplate.of_tokenizer(tokenizer)
    notes: list[str] = []
    encoded = {
        name: _encode(name, examples, tokenizer, template, config, notes)
        for name, examples in splits.items()
    }
    # Without the locations: the digest must not depend on the paths of the files.
    content = {name: [each[:2] for each in examples] for name, examples in splits.items()}
    digest = corpus_digest(tokenizer, {"template": template.source, **content})
    return ExampleCorpus(tokenizer, encoded, digest, notes=tuple(notes))


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
            f"the {name} split: {dropped:,} of {len(encoded):,} conversations have no answer in "
            "their first data.max_length tokens and are left out"
        )
    if not kept:
        raise UserError(
            f"the {name} split: has no answers of an assistant; give completions, or raise "
            f"data.max_length {limit}"
        )
    lengths = [len(each.tokens) - 1 for each in kept]
    rows = pack(lengths, limit) if config.packing else [[i] for i in range(len(kept))]
    return ConversationSplit(
        tokens=_rows(rows, [each.tokens[:-1] for each in kept]),
        targets=_rows(rows, [each.tokens[1:] for each in kept]),
        counted=_rows(rows, [each.is_completion[1:] for each in kept]),
        segments=RaggedArray.from_sequences(
            [np.repeat(np.arange(1, len(row) + 1), [lengths[i] for i in row]) for row in rows]
        ),
        positions=_rows(rows, [np.arange(length) for length in lengths]),
        num_conversations=len(kept),
    )


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


def _rows(rows: Sequence[Sequence[int]], parts: Sequence[np.ndarray]) -> RaggedArray:
    return RaggedArray.from_sequences([np.concatenate([parts[i] for i in row]) for row in rows])
