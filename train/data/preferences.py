"""Preference data: pairs of answers to one prompt, the better and the worse.

A pair has `prompt`, `chosen` and `rejected`: three texts, or three lists of messages. Its prompt
may have another form that a conversation has (`train.data.conversations`), and lists of messages
in `chosen` and `rejected` may begin with it. A row of tokens holds one pair: prompt and chosen
answer as segment 1, prompt and rejected answer as segment 2.

A pair may also have `reference`, the log-likelihoods of both answers under another model with the
number of tokens that they sum over: {"chosen": -21.5, "rejected": -30.2, "tokens": [9, 12]}.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from train.data.chat_template import ASSISTANT, ChatTemplate, ChatTokens
from train.data.conversations import (
    ANSWERS,
    LISTS,
    QUESTIONS,
    Conversation,
    ConversationSplit,
    encode_conversation,
    notes_on_fields,
    parse_conversation,
    parse_messages,
    prepare_template,
    require_ends_of_turns,
)
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    encode_splits,
    read_splits,
)
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from transformer.validation import Bounds, Mark


@dataclasses.dataclass(frozen=True)
class PreferenceDataConfig(ExampleDataConfig):
    """Pairs of answers in JSON lines: `prompt`, `chosen` and `rejected`, texts or messages."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 512
    """Tokens of a row, which holds both sequences of a pair: half of it for each. Longer sequences
    are cut at their ends; their number is reported."""

    chat_template: str = ""
    """File with a Jinja template. Empty: the template of the tokenizer, or a plain default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ends_of_turns(self.tokenizer)


PARTS = ("chosen", "rejected")

REMEDY = "give prompt, chosen and rejected; docs/tasks.md#preferences shows the formats"


class Reference(NamedTuple):
    """Log-likelihoods of both answers under a fixed model."""

    log_likelihoods: tuple[float, float]
    """Log-likelihoods of the chosen and the rejected answer, in nats."""
    num_tokens: tuple[int, int]
    """Tokens that each sums over: they show if it was computed from the same tokens."""


class Pair(NamedTuple):
    """Two conversations with the same prompt."""

    chosen: Conversation
    rejected: Conversation
    reference: Reference | None = None


def parse_pair(location: str, row: Any) -> Pair:
    """Return the pair of a row.

    Raises:
      UserError: A part is missing or malformed.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{location}: is not an object; {REMEDY}")
    row = {name: value for name, value in row.items() if value is not None}
    for name in PARTS:
        if name not in row:
            has = ", ".join(map(str, row)) or "none"
            raise UserError(f"{location}: has no field {name!r} (it has {has}); {REMEDY}")
    chosen, rejected = (_parse_answer(location, row, name) for name in PARTS)
    return Pair(chosen, rejected, _parse_reference(location, row.get("reference")))


def _parse_answer(location: str, row: Mapping[str, Any], name: str) -> Conversation:
    """Return the conversation of the prompt and one of both answers."""
    others = {key: value for key, value in row.items() if key not in (*PARTS, "reference")}
    field = next((key for key in (*LISTS, *QUESTIONS) if key in row), "")
    question, answer = others.get(field), row[name]
    if isinstance(answer, Mapping):
        answer = [answer]
    if isinstance(question, list | tuple):
        del others[field]
        if isinstance(answer, str):
            answer = [{"role": ASSISTANT, "content": answer}]
    elif isinstance(answer, str):
        if not field:
            has = ", ".join(map(str, row))
            raise UserError(f"{location}: has no prompt beside its texts (it has {has}); {REMEDY}")
        answer_field = "completion" if field == "prompt" else ANSWERS[0]
        return parse_conversation(location, others | {answer_field: answer})
    else:  # both have the question, and a text beside them repeats it
        both = [parse_messages(location, each, row[each]) for each in PARTS]
        differs = (i for i, (x, y) in enumerate(zip(*both, strict=False)) if x != y)
        question, answer = answer[: (shared := next(differs, 0))], answer[shared:]
        repeated = others.pop(field, None)
        if not question or repeated not in (None, *(each.get("content") for each in both[0])):
            raise UserError(
                f"{location}: chosen and rejected do not begin with the same prompt; {REMEDY}"
            )
    return parse_conversation(location, others | {"prompt": question, "completion": answer})


def _parse_reference(location: str, value: Any) -> Reference | None:
    """Return the log-likelihoods of a line; None if it has none."""
    if value is None:
        return None
    try:
        chosen, rejected = float(value["chosen"]), float(value["rejected"])
        first, second = (int(number) for number in value["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{location}: its reference is malformed; write it with python -m train reference"
        ) from error
    if not (-math.inf < chosen <= 0 and -math.inf < rejected <= 0):
        raise UserError(
            f"{location}: its reference {chosen}, {rejected} is not a pair of log-likelihoods; "
            "write it with python -m train reference"
        )
    return Reference((chosen, rejected), (first, second))


@dataclasses.dataclass(frozen=True, eq=False)
class PreferenceSplit:
    """Rows of one pair each."""

    rows: ConversationSplit
    """The chosen sequence is segment 1, the rejected one segment 2."""
    reference: np.ndarray  # [n, 2] float32
    """Log-likelihoods of both answers under the reference; NaN where a pair has none."""

    @property
    def num_targets(self) -> np.ndarray:  # [n, 2]
        """Number of tokens of both answers of each pair."""
        of_answers = [
            self.rows.segments[row][self.rows.counted[row] > 0]
            for row in range(len(self.reference))
        ]
        return np.array([[np.sum(each == side) for side in (1, 2)] for each in of_answers])

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Number of tokens of each row."""
        return self.rows.lengths

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some rows, padded to T tokens.

        The arrays are those of `ConversationSplit.batch`, and `reference_chosen` and
        `reference_rejected` [B] float32, 0 in empty rows.
        """
        reference = np.where(indices[:, None] < 0, 0, self.reference[indices])  # [B, 2]
        chosen, rejected = reference[:, 0], reference[:, 1]
        rows = self.rows.batch(indices, lengths)
        return rows | {"reference_chosen": chosen, "reference_rejected": rejected}


def prepare_preferences(
    config: PreferenceDataConfig, tokenizer: Tokenizer | None = None
) -> ExampleCorpus[PreferenceSplit]:
    """Read, render and tokenize the pairs that `config` names.

    A `tokenizer` takes the place of the one that `config.tokenizer` describes.

    Raises:
      UserError: A file is missing or malformed, or no pair is left.
    """
    splits = read_splits(config, parse_pair)
    both = {
        split: [conversation for pair in pairs for conversation in pair[:2]]
        for split, pairs in splits.items()
    }
    used, template = prepare_template(config, config.chat_template, tokenizer, both)
    splits.notes += notes_on_fields(template, itertools.chain.from_iterable(both.values()))
    limit = config.max_length // 2
    return encode_splits(
        splits,
        used,
        lambda split, pairs: encode_split(split, pairs, used, template, limit, splits.notes),
        content=lambda pair: [pair.chosen.content, pair.rejected.content, *(pair.reference or ())],
        identity={"template": template.source},
    )


def encode_split(
    name: str,
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    limit: int,
    notes: list[str],
) -> PreferenceSplit:
    """Tokenize a split, each sequence cut to `limit` tokens and one to predict.

    Notes on cut and dropped pairs are appended to `notes`.
    """
    rows, reference, num_cut = [], [], 0
    for pair in pairs:
        full = [encode_conversation(tokenizer, template, each) for each in pair[:2]]
        num_cut += any(len(each.tokens) > limit + 1 for each in full)
        row = [ChatTokens(*(array[: limit + 1] for array in each)) for each in full]
        # The first token has nothing to be predicted from.
        chosen, rejected = (int(each.is_completion[1:].sum()) for each in row)
        if chosen and rejected:
            rows.append(row)
            reference.append(_check_reference(pair, (chosen, rejected)))
    if num_cut:
        notes.append(
            f"the {name} split: {num_cut:,} of {len(pairs):,} pairs have a sequence of more than "
            f"{limit} tokens, half of data.max_length, and are cut at their ends"
        )
    if dropped := len(pairs) - len(rows):
        notes.append(
            f"the {name} split: {dropped:,} of {len(pairs):,} pairs have no answer left and are "
            "left out"
        )
    if not rows:
        raise UserError(
            f"the {name} split: has no pair of answers; give some, or raise data.max_length"
        )
    return PreferenceSplit(ConversationSplit.of_rows(rows), np.array(reference, np.float32))


def _check_reference(pair: Pair, num_targets: tuple[int, int]) -> tuple[float, float]:
    """Return the log-likelihoods of a pair, or NaN.

    Raises:
      UserError: They are those of other tokens.
    """
    if pair.reference is None:
        return math.nan, math.nan
    if pair.reference.num_tokens != num_targets:
        raise UserError(
            f"{pair.chosen.location}: its reference sums over {pair.reference.num_tokens} tokens, "
            f"and the answers have {num_targets}; write it with the run's tokenizer, chat template "
            "and data.max_length"
        )
    return pair.reference.log_likelihoods
