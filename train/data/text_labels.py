"""Labeled texts: files, encoding, and batches for classification of whole texts."""

import codecs
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    ExampleSplits,
    check_text_pair,
    encode_splits,
    label_indices,
    preview_names,
    read_splits,
    tokenize_examples,
    tokenizer_for_splits,
)
from train.data.files import Notes, TextFile
from train.data.rows import FORMATS_PAGE, TextForm, located_rows
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError

ClassificationFormat = Literal["tsv", "label_first"]


@dataclasses.dataclass(frozen=True)
class ClassificationDataConfig(ExampleDataConfig):
    """Labeled texts: rows of CSV, TSV, JSON or Parquet, or a label and a text a line.

    Columns with usual names (text, sentence, review; label, class, sentiment) are found.
    """

    format: ClassificationFormat = "tsv"
    """Format of plain text. tsv: separated columns. label_first: the first word is the label and
    the rest is the text, as in TREC's question files."""

    label_column: str = "label"
    """Column of the label, by its name or by its number from 0."""

    text_column: str = "text"
    """Column of the text, by its name or by its number from 0."""

    header: bool = True
    """The first line of CSV names the columns. False: the numbers of columns are those of a file
    without names. A first line with usual names is recognized either way."""

    coarse_labels: bool = False
    """Keep only the part of a label before its first colon: DESC of DESC:manner."""

    encoding: str = "utf-8"
    """Encoding of files that are not UTF-8: latin-1, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "tsv" and not self.header:
            for name in ("label_column", "text_column"):
                column = getattr(self, name)
                if not column.isdecimal():
                    raise UsageError(
                        f"data.{name}: {column!r} is not a column number, and there is no header "
                        "to find a name in; give 0 or more, or set data.header"
                    )
        if self.label_column == self.text_column:
            raise UsageError(
                f"data.text_column: column {self.text_column} is the label; give another"
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise UsageError(
                f"data.encoding: {self.encoding!r} is not known; give utf-8 or latin-1, say"
            ) from None


class LabeledText(NamedTuple):
    """A text, its label, and its location for error messages."""

    label: str
    text: str
    location: str


TEXT_COLUMNS = (
    *("text", "sentence", "review", "content", "comment", "tweet", "message", "question"),
    *("document", "utterance", "query", "body", "headline", "description", "title"),
)
"""Usual names of the column of the text, the first that is there."""

LABEL_COLUMNS = (
    *("label", "labels", "class", "category", "sentiment", "target", "intent", "emotion", "topic"),
    *("polarity", "rating", "stars", "score", "coarse_label", "fine_label", "label_text"),
)
"""Usual names of the column of the label, the first that is there."""


def read_labeled_texts(
    config: ExampleDataConfig, columns: ClassificationDataConfig
) -> ExampleSplits[LabeledText]:
    """Return the labeled texts of every split."""

    def is_header(cells: Sequence[str]) -> bool:
        if columns.format == "tsv" and columns.header:
            return True
        return None not in find_columns(tuple(name.strip() for name in cells), columns)

    def read(files: Sequence[TextFile], notes: Notes) -> Iterator[tuple[str, Any]]:
        form: TextForm = "cells" if columns.format == "tsv" else "lines"
        for file in files:
            rows = located_rows(file, text=form, encoding=columns.encoding, is_header=is_header)
            for number, (location, row) in enumerate(rows):
                if not number and isinstance(row, Mapping):
                    names = find_columns(tuple(row), columns)
                    usual = (LABEL_COLUMNS[0], TEXT_COLUMNS[0])
                    given = (columns.label_column, columns.text_column)
                    if None not in names and names not in (usual, given):
                        notes.add(file.path, "has its labels in {!r}, texts in {!r}".format(*names))
                yield location, row

    return read_splits(
        config,
        lambda location, row: parse_labeled_text(location, row, columns),
        lambda location, pair: LabeledText(*check_text_pair(location, pair)[::-1], location),
        read=read,
    )


@functools.lru_cache
def find_columns(
    names: tuple[str, ...], columns: ClassificationDataConfig
) -> tuple[str | None, str | None]:
    """Return the names of the columns of label and text: as configured, else the usual ones."""

    def find(wanted: str, usual: Sequence[str]) -> str | None:
        if wanted in names:
            return wanted
        # Numbers count the columns of a file without names; those of others with header only.
        if wanted.isdecimal() and columns.header:
            return next((name for n, name in enumerate(names) if str(n) == wanted), None)
        if wanted != usual[0] and not wanted.isdecimal():
            return None
        known = {name.lower(): name for name in reversed(names)}
        return next((known[name] for name in usual if name in known), None)

    return find(columns.label_column, LABEL_COLUMNS), find(columns.text_column, TEXT_COLUMNS)


def parse_labeled_text(
    location: str, row: Any, columns: ClassificationDataConfig
) -> LabeledText | None:
    """Return the labeled text of a row; None if one of both is null.

    Raises:
      UserError: It has no such columns, or they hold something else.
    """
    if isinstance(row, str):
        label, _, text = row.strip().partition(" ")
        if not text:
            raise UserError(
                f"{location}: has one word only; write a label, a space and a text "
                f"({FORMATS_PAGE}#labeled-texts)"
            )
    elif isinstance(row, Mapping):
        label_name, text_name = find_columns(tuple(row), columns)
        for setting, name in (("label_column", label_name), ("text_column", text_name)):
            if name is None:
                raise UserError(
                    f"{location}: has no column {getattr(columns, setting)!r} (it has "
                    f"{preview_names([each[:40] for each in row])}); set data.{setting}, or "
                    f"data.header to False if the first line is an example "
                    f"({FORMATS_PAGE}#labeled-texts)"
                )
        value, text = row[label_name], row[text_name]
        if value is None or text is None:
            return None
        if not isinstance(text, str) or not isinstance(value, str | int | float):
            raise UserError(
                f"{location}: {text_name!r} is not a text or {label_name!r} not a label; set "
                f"data.text_column and data.label_column ({FORMATS_PAGE}#labeled-texts)"
            )
        label = f"{value:.15g}" if isinstance(value, float) else str(value).strip()
    else:
        raise UserError(
            f"{location}: is no row; give objects with a label ({FORMATS_PAGE}#labeled-texts)"
        )
    if not label:
        raise UserError(f"{location}: its label is empty; correct the line, or leave it out")
    return LabeledText(label.partition(":")[0] if columns.coarse_labels else label, text, location)


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationSplit:
    """Tokenized texts of a split, each after a start token whose vector can represent the text."""

    texts: Sequence[str]
    tokens: RaggedArray
    targets: np.ndarray  # [n] int32
    """Index of the label of each text."""

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Number of tokens of each text."""
        return self.tokens.lengths[:, None]

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some texts, padded to T tokens.

        Returns:
          tokens: [B, T] int32.
          segments: [B, T] int32, 1 where tokens are not padding.
          targets: [B] int32, the label indices.
          weights: [B] float32, 1 unless the row is empty.
          examples: [B] uint32, the indices of the texts within the split.
        """
        tokens, real = self.tokens.pad(indices, lengths[0])
        return {
            "tokens": tokens,
            "segments": real.astype(np.int32),
            "targets": np.where(indices < 0, 0, self.targets[indices]),
            "weights": (indices >= 0).astype(np.float32),
            "examples": example_ids(np.maximum(indices, 0)),
        }


def prepare_classification(
    config: ClassificationDataConfig,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
) -> ExampleCorpus[ClassificationSplit]:
    """Read and tokenize the texts that ``config`` names.

    A `tokenizer` and `labels` take the place of those of the settings and of ``config.path``.

    Raises:
      UserError: A file is missing, empty or not encoded as configured, a line is malformed, or a
        label is not among ``labels``.
    """
    splits = read_labeled_texts(config, config)
    examples = splits.all_training
    names = labels or sorted({example.label for example in examples})
    if len(names) > max(10, len(examples) // 2):
        splits.notes.append(
            f"the train split: its {len(examples):,} texts have {len(names):,} labels; see whether "
            "data.label_column and data.text_column are the right columns"
        )
    return make_classification_corpus(config, splits, names, tokenizer)


def make_classification_corpus(
    config: ExampleDataConfig,
    splits: ExampleSplits[LabeledText],
    names: Sequence[str],
    tokenizer: Tokenizer | None = None,
) -> ExampleCorpus[ClassificationSplit]:
    """Tokenize texts that have been read. ``names`` are the labels by index."""
    used = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {
            split: (f" {example.text.strip()}" for example in examples)
            for split, examples in splits.items()
        },
    )

    def encode(split: str, examples: Sequence[LabeledText]) -> ClassificationSplit:
        labels = ((example.label, example.location) for example in examples)
        targets = np.array(label_indices(labels, names, "label"), np.int32)
        texts = [example.text for example in examples]
        tokens = encode_texts(used, texts)
        if num_cut := sum(len(text) > config.max_length for text in tokens):
            splits.notes.append(
                f"the {split} split: {num_cut:,} of {len(texts):,} texts are longer than "
                f"data.max_length {config.max_length} tokens and are cut"
            )
        cut = [cut_text(used, each, config.max_length) for each in tokens]
        return ClassificationSplit(texts, RaggedArray.from_sequences(cut), targets)

    return encode_splits(
        splits,
        used,
        encode,
        content=lambda example: example[:2],
        labels=names,
        identity={"labels": tuple(names)},
    )


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:  # each [T] int32
    """Return the tokens of texts, between those that begin and end the text of a classifier.

    A published tokenizer says which these are; else `cls_token_id` begins it and nothing ends it.
    """
    before, after = tokenizer.added_token_ids
    before = before if len(before) else np.array([tokenizer.cls_token_id])
    return [
        np.concatenate([before, tokens, after]).astype(np.int32)
        for tokens in tokenize_examples(tokenizer, texts)
    ]


def cut_text(tokenizer: Tokenizer, tokens: np.ndarray, max_length: int) -> np.ndarray:  # [T]
    """Return the tokens of `encode_texts` cut to a length, those that end the text kept."""
    if len(tokens) <= max_length:
        return tokens
    _, after = tokenizer.added_token_ids
    return np.append(tokens[: max(0, max_length - len(after))], after)[:max_length]
