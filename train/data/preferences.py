"""Preference data: pairs of answers to one prompt, the better and the worse, in JSON lines.

A line has `prompt`, `chosen` and `rejected`: three texts, or three lists of messages. A row holds
one pair: prompt and chosen answer as segment 1, prompt and rejected answer as segment 2.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.chat_template import ChatTemplate, ChatTokens
from train.data.conversations import (
    Conversation,
    encode_conversation,
    parse_conversation,
    read_json_objects,
    with_template,
)
from train.data.example_configs import PreferenceDataConfig
from train.data.examples import ExampleCorpus, corpus_digest, read_splits, tokenizer_for_splits
from train.data.streams import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UserError


class Pair(NamedTuple):
    """Two conversations with the same prompt."""

    chosen: Conversation
    rejected: Conversation


def parse_pair(location: str, record: Any) -> Pair:
    """Return the pair of a JSON object.

    Raises:
      UserError: A part is missing or malformed.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{location}: is not an object; give prompt, chosen and rejected")
    for name in ("prompt", "chosen", "rejected"):
        if name not in record:
            has = ", ".join(map(str, record)) or "none"
            raise UserError(f"{location}: has no field {name!r} (it has {has}); give one")
    prompt = record["prompt"]
    return Pair(
        *(
            parse_conversation(location, {"prompt": prompt, "completion": record[name]})
            for name in ("chosen", "rejected")
        )
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PreferenceSplit:
    """Rows of one pair each."""

    tokens: RaggedArray
    targets: RaggedArray
    counted: RaggedArray
    """1 for each target of an answer."""
    segments: RaggedArray
    """1 for the chosen sequence, 2 for the rejected one."""
    positions: RaggedArray

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Number of tokens of each row."""
        return self.tokens.lengths[:, None]

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some rows, padded to T tokens: the arrays of `ConversationSplit.batch`."""
        fields = ("tokens", "targets", "segments", "positions")
        batch = {name: getattr(self, name).pad(indices, lengths[0])[0] for name in fields}
        weights = self.counted.pad(indices, lengths[0])[0].astype(np.float32)
        return batch | {"weights": weights, "examples": example_ids(np.maximum(indices, 0))}


def prepare_preferences(
    config: PreferenceDataConfig, tokenizer: Tokenizer | None = None
) -> ExampleCorpus[PreferenceSplit]:
    """Read, render and tokenize the pairs that `config` names.

    Args:
      config: Files, template and tokenizer.
      tokenizer: Used instead of the one that `config.tokenizer` describes.

    Raises:
      UserError: A file is missing or malformed, or no pair is left.
    """

    def read(setting: str, path: str) -> list[Pair]:
        return [parse_pair(*each) for each in read_json_objects(setting, path)]

    splits = read_splits(config, read, parse_pair)
    tokenizer = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {name: [each.text() for pair in pairs for each in pair] for name, pairs in splits.items()},
    )
    tokenizer = with_template(tokenizer, config.chat_template)
    template = ChatTemplate.of_tokenizer(tokenizer)
    notes: list[str] = []
    encoded = {
        name: _encode(name, pairs, tokenizer, template, config.max_length // 2, notes)
        for name, pairs in splits.items()
    }
    # Without the locations: the digest must not depend on the paths of the files.
    content = {
        name: [[each[:2] for each in pair] for pair in pairs] for name, pairs in splits.items()
    }
    digest = corpus_digest(tokenizer, {"template": template.source, **content})
    return ExampleCorpus(tokenizer, encoded, digest, notes=tuple(notes))


def _encode(
    name: str,
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    limit: int,
    notes: list[str],
) -> PreferenceSplit:
    """Tokenize a split. Notes on cut and dropped pairs are appended to `notes`."""
    encoded = [[encode_conversation(tokenizer, template, x) for x in pair] for pair in pairs]
    num_cut = sum(any(len(each.tokens) > limit + 1 for each in pair) for pair in encoded)
    cut = [[ChatTokens(*(x[: limit + 1] for x in each)) for each in pair] for pair in encoded]
    # The first token has nothing to be predicted from.
    kept = [pair for pair in cut if all(each.is_completion[1:].any() for each in pair)]
    if num_cut:
        notes.append(
            f"the {name} split: {num_cut:,} of {len(pairs):,} pairs have a sequence of more than "
            f"{limit} tokens, half of data.max_length, and are cut at their ends"
        )
    if dropped := len(cut) - len(kept):
        notes.append(
            f"the {name} split: {dropped:,} of {len(pairs):,} pairs have no answer left and are "
            "left out"
        )
    if not kept:
        raise UserError(
            f"the {name} split: has no pair of answers; give some, or raise data.max_length"
        )
    return PreferenceSplit(
        tokens=_rows([[each.tokens[:-1] for each in pair] for pair in kept]),
        targets=_rows([[each.tokens[1:] for each in pair] for pair in kept]),
        counted=_rows([[each.is_completion[1:] for each in pair] for pair in kept]),
        segments=_rows(
            [
                [np.full(len(each.tokens) - 1, number) for number, each in enumerate(pair, start=1)]
                for pair in kept
            ]
        ),
        positions=_rows([[np.arange(len(each.tokens) - 1) for each in pair] for pair in kept]),
    )


def _rows(pairs: Sequence[Sequence[np.ndarray]]) -> RaggedArray:
    return RaggedArray.from_sequences([np.concatenate(pair) for pair in pairs])
