"""Labeled texts: files, encoding, and batches for classification of whole texts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.example_configs import ClassificationDataConfig, ExampleDataConfig
from train.data.examples import (
    ExampleCorpus,
    check_text_pair,
    corpus_digest,
    label_indices,
    preview_names,
    read_splits,
    tokenize_examples,
    tokenizer_for_splits,
    with_leading_space,
)
from train.data.files import find_file
from train.data.text_files import line_location, read_lines
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UserError


class LabeledText(NamedTuple):
    """A text, its label, and its location for error messages."""

    label: str
    text: str
    location: str


def read_labeled_texts(
    config: ClassificationDataConfig, setting: str, path: str
) -> Iterator[LabeledText]:
    """Yield the texts of a file, one for each line that is not empty."""
    file = find_file(path, setting)
    lines = read_lines(file, config.encoding)
    columns = _columns(config, lines[0], line_location(file, 0)) if config.format == "tsv" else None
    skip = 1 if config.format == "tsv" and config.header else 0
    for index, line in enumerate(lines[skip:], start=skip):
        if line.strip():
            location = line_location(file, index)
            if columns:
                label, text = _by_columns(line, columns, location)
            else:
                label, text = _first_word(line, location)
            if not label:
                raise UserError(
                    f"{location}: its label is empty; correct the line, or leave it out"
                )
            yield LabeledText(
                label.partition(":")[0] if config.coarse_labels else label, text, location
            )


def _columns(config: ClassificationDataConfig, first: str, location: str) -> tuple[int, int]:
    """Return the indices of the columns of label and text."""
    if not config.header:
        return int(config.label_column), int(config.text_column)
    names = first.split("\t")
    indices = []
    for setting, column in (
        ("label_column", config.label_column),
        ("text_column", config.text_column),
    ):
        if column in names:
            indices.append(names.index(column))
        elif column.isdecimal():
            indices.append(int(column))
        else:
            raise UserError(
                f"{location}: the header has no column {column!r} (it has {preview_names(names)}); "
                f"set data.{setting}, or data.header to False if this line is an example"
            )
    return indices[0], indices[1]


def _by_columns(line: str, columns: tuple[int, int], location: str) -> tuple[str, str]:
    cells = line.split("\t")
    if max(columns) >= len(cells):
        raise UserError(
            f"{location}: has {len(cells)} columns, but data.label_column and "
            f"data.text_column ask for column {max(columns)}, counted from 0; correct the "
            "line or these settings (columns are separated by tabs)"
        )
    return cells[columns[0]].strip(), cells[columns[1]]


def _first_word(line: str, location: str) -> tuple[str, str]:
    label, _, text = line.strip().partition(" ")
    if not text:
        raise UserError(f"{location}: has one word only; write a label, a space and a text")
    return label, text


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

    Args:
      config: Files and tokenizer.
      tokenizer: Used instead of the one that ``config.tokenizer`` describes.
      labels: The labels by index; None: those of ``config.path``, sorted.

    Raises:
      UserError: A file is missing, empty or not encoded as configured, a line is malformed, or a
        label is not among ``labels``.
    """
    splits = read_splits(
        config,
        lambda setting, path: list(read_labeled_texts(config, setting, path)),
        lambda location, pair: LabeledText(*check_text_pair(location, pair)[::-1], location),
    )
    names = labels or sorted({example.label for example in splits.before_holdout()})
    return make_classification_corpus(config, splits, names, tokenizer)


def make_classification_corpus(
    config: ExampleDataConfig,
    splits: Mapping[str, Sequence[LabeledText]],
    label_names: Sequence[str],
    tokenizer: Tokenizer | None = None,
) -> ExampleCorpus[ClassificationSplit]:
    """Tokenize texts that have been read. ``label_names`` are the labels by index."""
    tokenizer = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {
            split: with_leading_space(example.text for example in examples)
            for split, examples in splits.items()
        },
    )
    notes: list[str] = []
    encoded = {
        split: _encode(split, examples, tokenizer, label_names, config.max_length, notes)
        for split, examples in splits.items()
    }
    # Without the locations: the digest must not depend on the paths of the files.
    content = {split: [example[:2] for example in examples] for split, examples in splits.items()}
    digest = corpus_digest(tokenizer, {"labels": tuple(label_names), **content})
    return ExampleCorpus(tokenizer, encoded, digest, tuple(label_names), tuple(notes))


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:  # each [T] int32
    """Return the tokens of texts, between those that begin and end the text of a classifier.

    A published tokenizer says which these are; else `cls_token_id` begins it and nothing ends it.
    """
    before, after = tokenizer.added_token_ids
    before = before if len(before) else np.array([tokenizer.cls_token_id])
    return [
        np.concatenate([before, tokens, after]).astype(np.int32)
        for tokens in tokenize_examples(tokenizer, with_leading_space(texts))
    ]


def cut_text(tokenizer: Tokenizer, tokens: np.ndarray, max_length: int) -> np.ndarray:  # [T]
    """Return the tokens of `encode_texts` cut to a length, those that end the text kept."""
    if len(tokens) <= max_length:
        return tokens
    _, after = tokenizer.added_token_ids
    return np.append(tokens[: max(0, max_length - len(after))], after)[:max_length]


def _encode(
    split: str,
    examples: Sequence[LabeledText],
    tokenizer: Tokenizer,
    label_names: Sequence[str],
    max_length: int,
    notes: list[str],
) -> ClassificationSplit:
    """Tokenize a split. Notes on truncated texts are appended to ``notes``."""
    labels = ((example.label, example.location) for example in examples)
    targets = np.array(label_indices(labels, label_names, "label"), np.int32)
    texts = [example.text for example in examples]
    tokens = encode_texts(tokenizer, texts)
    if num_truncated := sum(len(text) > max_length for text in tokens):
        notes.append(
            f"the {split} split: {num_truncated:,} of {len(texts):,} texts are longer than "
            f"data.max_length {max_length} tokens and are cut"
        )
    return ClassificationSplit(
        texts,
        RaggedArray.from_sequences([cut_text(tokenizer, each, max_length) for each in tokens]),
        targets,
    )
