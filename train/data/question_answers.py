"""Questions about texts, as in SQuAD: files, encoding in windows, and batches."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    encode_splits,
    read_splits,
    tokenizer_for_splits,
)
from train.data.files import Notes, TextFile
from train.data.rows import FORMATS_PAGE, located_rows
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer, TokenPair
from train.errors import UsageError, UserError
from transformer.validation import Bounds, Mark, NonNegativeInt


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringDataConfig(ExampleDataConfig):
    """Questions, texts, and the answers within them: SQuAD's files, or rows of JSON or Parquet.

    A row has `question`, `context` and `answers`: their `text`, and in `answer_start` the character
    of the context that each begins at. A question without an answer has an empty list (SQuAD 2.0).
    """

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 384
    """Maximum number of tokens of a row: question, text, and the tokens around them. A longer text
    is cut into several overlapping windows, each with the question."""

    overlap: NonNegativeInt = 128
    """Tokens of the text that a window has in common with the one before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= self.max_length:
            raise UsageError(
                f"data.overlap {self.overlap}: leaves windows of data.max_length "
                f"{self.max_length} nothing of their own; give less"
            )


class Question(NamedTuple):
    """A question, the text with the answer, and answers of several people."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    """Text and first character of each; empty: the text has none."""
    location: str
    """Place of the row, for error messages."""


def parse_question(location: str, row: Any) -> Question | None:
    """Return the question of a row; None if a field of it is null.

    Raises:
      UserError: It has no such fields, or an answer is not where it should be.
    """
    fields = ("question", "context", "answers")
    if not isinstance(row, Mapping) or not all(name in row for name in fields):
        names = ", ".join(row)[:200] if isinstance(row, Mapping) else "one text"
        raise UserError(
            f"{location}: has no fields {', '.join(fields)} (it has {names}); give them "
            f"({FORMATS_PAGE}#questions)"
        )
    question, context, answers = (row[name] for name in fields)
    if question is None or context is None or answers is None:
        return None
    try:
        if isinstance(answers, Mapping):
            pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
        misplaced = [
            (text, start)
            for text, start in pairs
            if start < 0 or not context.startswith(text, start)
        ]
        question = question.lstrip()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{location}: its answers have no text and answer_start, or question and context are "
            f"no texts; correct the row ({FORMATS_PAGE}#questions)"
        ) from error
    if misplaced:
        raise UserError(
            "{}: answer {!r} does not stand at character {} of its context; correct "
            "answer_start".format(location, *misplaced[0])
        )
    return Question(question, context, tuple(pair for pair in pairs if pair[0]), location)


def _read_rows(files: Sequence[TextFile], notes: Notes) -> Iterator[tuple[str, Any]]:
    """Yield the rows of files; of SQuAD's articles, a row for each question."""
    for location, row in located_rows(*files):
        if not isinstance(row, Mapping) or "paragraphs" not in row:
            yield location, row
            continue
        try:
            for paragraph in row["paragraphs"]:
                for each in paragraph["qas"]:
                    name = f"{location}, question {each.get('id')}"
                    yield name, {**each, "context": paragraph["context"]}
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"{location}: its paragraphs have no context and qas, as SQuAD's do "
                f"({FORMATS_PAGE}#questions); correct it"
            ) from error


NO_SPAN = -1
"""First character of tokens that are not of the context."""


@dataclasses.dataclass(frozen=True, eq=False)
class QuestionSplit:
    """Windows of the questions of a split: n rows, at least one for each question."""

    questions: Sequence[Question]
    question_indices: np.ndarray  # [n] int64
    """Index of the question of each row, ascending."""
    tokens: RaggedArray
    types: RaggedArray
    starts: RaggedArray
    """First character of each token of the context; `NO_SPAN` elsewhere."""
    ends: RaggedArray
    """Character after the last, likewise."""
    targets: np.ndarray  # [n, 2] int32
    """First and last token of the answer; both 0, the first token, where a row does not have it."""

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Number of tokens of each row."""
        return self.tokens.lengths[:, None]

    @property
    def has_unanswerable(self) -> bool:
        """True if a question has no answer."""
        return not all(question.answers for question in self.questions)

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some rows, padded to T tokens.

        Returns:
          tokens, token_types: [B, T] int32.
          segments: [B, T] int32, 1 where tokens are not padding.
          targets: [B, 2] int32, the first and the last token of the answer.
          weights: [B, 2] float32, 1 unless the row is empty.
          examples: [B] uint32, the indices of the rows within the split.
        """
        tokens, real = self.tokens.pad(indices, lengths[0])
        types, _ = self.types.pad(indices, lengths[0])
        is_row = (indices >= 0)[:, None]
        return {
            "tokens": tokens,
            "token_types": types,
            "segments": real.astype(np.int32),
            "targets": np.where(is_row, self.targets[indices], 0),
            "weights": np.repeat(is_row.astype(np.float32), 2, axis=1),
            "examples": example_ids(np.maximum(indices, 0)),
        }


def prepare_questions(
    config: QuestionAnsweringDataConfig, tokenizer: Tokenizer | None = None
) -> ExampleCorpus[QuestionSplit]:
    """Read and tokenize the questions that ``config`` names.

    A `tokenizer` takes the place of the one of the settings.

    Raises:
      UserError: A file is missing, empty or damaged, or a row is malformed.
    """
    splits = read_splits(config, parse_question, read=_read_rows)
    used = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {
            split: (text for each in questions for text in (each.question, each.context))
            for split, questions in splits.items()
        },
    )

    def encode(name: str, questions: Sequence[Question]) -> QuestionSplit:
        split = make_question_split(used, questions, config.max_length, config.overlap)
        if num_extra := len(split.question_indices) - len(questions):
            splits.notes.append(
                f"the {name} split: texts of more than data.max_length {config.max_length} tokens "
                f"continue in further windows, {num_extra:,} beside the {len(questions):,} first"
            )
        return split

    return encode_splits(splits, used, encode, content=lambda question: question[:3])


def make_question_split(
    tokenizer: Tokenizer, questions: Sequence[Question], max_length: int, overlap: int
) -> QuestionSplit:
    """Return the windows of questions. The first answer of each is the target."""
    indices, windows, targets = [], [], []
    pairs = tokenizer.encode_pairs((each.question, each.context) for each in questions)
    for index, (question, pair) in enumerate(zip(questions, pairs, strict=True)):
        try:
            parts = cut_windows(pair, max_length, overlap)
        except ValueError as error:
            raise UserError(f"{question.location}: {error}") from error
        for window in parts:
            indices.append(index)
            windows.append(window)
            targets.append(answer_tokens(window, *question.answers[:1]))
    spans = [np.full((len(each.tokens), 2), NO_SPAN) for each in windows]
    for span, window in zip(spans, windows, strict=True):
        span[window.start : window.start + len(window.spans)] = window.spans
    return QuestionSplit(
        questions,
        np.array(indices),
        RaggedArray.from_sequences([each.tokens for each in windows]),
        RaggedArray.from_sequences([each.types for each in windows]),
        RaggedArray.from_sequences([each[:, 0] for each in spans]),
        RaggedArray.from_sequences([each[:, 1] for each in spans]),
        np.array(targets, np.int32),
    )


def cut_windows(pair: TokenPair, max_length: int, overlap: int) -> list[TokenPair]:
    """Cut the second text of a pair into windows, each with all that stands around it.

    Raises:
      ValueError: The first text leaves no room for the second.
    """
    stop = pair.start + len(pair.spans)
    room = max_length - (len(pair.tokens) - len(pair.spans))
    if room < 1:
        raise ValueError(
            f"the question has {pair.start} tokens, which leave no room for the text in "
            f"{max_length}; shorten it, or raise data.max_length"
        )
    windows = []
    step = max(1, room - overlap)
    last = max(0, len(pair.spans) - room)  # where the last window may begin
    for begin in range(0, last + step, step):
        end = min(begin + room, len(pair.spans))
        context = np.arange(pair.start + begin, pair.start + end)
        kept = np.concatenate([np.arange(pair.start), context, np.arange(stop, len(pair.tokens))])
        spans = pair.spans[begin:end]
        windows.append(TokenPair(pair.tokens[kept], pair.types[kept], pair.start, spans))
    return windows


def answer_tokens(window: TokenPair, answer: tuple[str, int] = ("", 0)) -> tuple[int, int]:
    """Return the first and the last token of an answer; both 0 if the window does not have it."""
    text, start = answer
    stop, spans = start + len(text), window.spans
    if not text or not len(spans) or start < spans[0, 0] or stop > spans[-1, 1]:
        return 0, 0
    first = int(np.searchsorted(spans[:, 0], start, side="right")) - 1
    last = int(np.searchsorted(spans[:, 1], stop, side="left"))
    return window.start + first, window.start + last
