"""Texts and the classes that they belong to, for classifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from train.data.batches import example_ids
from train.data.example_config import ExampleDataConfig
from train.data.example_corpus import (
    ExampleCorpus,
    corpus_digest,
    label_indices,
    read_splits,
    tokenizer_for_splits,
    with_leading_space,
)
from train.data.labelled_config import ClassificationDataConfig
from train.data.labelled_files import LabeledText, read_labeled_texts
from train.data.ragged import RaggedArray
from train.data.tokenizer import Tokenizer
from train.data.windows import HostBatch


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationSplit:
    """The texts of a split, each with a token before it whose vector can stand for the whole."""

    texts: Sequence[str]
    tokens: RaggedArray
    targets: np.ndarray  # [n] int32
    """The number of each text's class."""

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Tokens of each text."""
        return self.tokens.lengths[:, None]

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Some texts, padded to T tokens.

        Returns:
          tokens: [B, T] int32.
          segments: [B, T] int32, 1 where they are no padding.
          targets: [B] int32, the classes.
          weights: [B] float32, 1 unless the row is empty.
          examples: [B] uint32, the numbers of the texts within the split.
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
    """Reads and encodes the texts that ``config`` names.

    Args:
      config: Which files, which tokenizer.
      tokenizer: Used in place of what ``config.tokenizer`` describes.
      labels: The names of the classes by number; those of ``config.path``, sorted, if None.

    Raises:
      UserError: A file is missing, empty or not encoded as the settings say, a line is not as
        they say, or a label is none of the classes.
    """
    splits = read_splits(
        config, lambda setting, path: list(read_labeled_texts(config, setting, path))
    )
    training = [*splits["train"], *([] if config.validation_path else splits["validation"])]
    names = labels or sorted({example.label for example in training})
    return make_classification_corpus(config, splits, names, tokenizer)


def make_classification_corpus(
    config: ExampleDataConfig,
    splits: Mapping[str, Sequence[LabeledText]],
    label_names: Sequence[str],
    tokenizer: Tokenizer | None = None,
) -> ExampleCorpus[ClassificationSplit]:
    """Encodes texts that have been read; ``label_names`` are those of the classes, by number."""
    tokenizer = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {
            split: with_leading_space(example.text for example in found)
            for split, found in splits.items()
        },
    )
    notes: list[str] = []
    encoded = {
        split: _encode(split, found, tokenizer, label_names, config.max_length, notes)
        for split, found in splits.items()
    }
    content = {split: [example[:2] for example in found] for split, found in splits.items()}
    digest = corpus_digest(tokenizer, {"labels": tuple(label_names), **content})
    return ExampleCorpus(tokenizer, encoded, digest, tuple(label_names), tuple(notes))


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:  # each [T] int32
    """The tokens of texts as a classifier reads them: after the one that stands for the whole."""
    first = np.array([tokenizer.cls_token_id])
    return [
        np.concatenate([first, tokens]).astype(np.int32)
        for tokens in tokenizer.encode_documents(with_leading_space(texts))
    ]


def _encode(
    split: str,
    examples: Sequence[LabeledText],
    tokenizer: Tokenizer,
    names: Sequence[str],
    longest: int,
    notes: list[str],
) -> ClassificationSplit:
    """Encodes a split; what is said of its texts goes to ``notes``."""
    labels = ((example.label, example.location) for example in examples)
    targets = np.array(label_indices(labels, names, "label"), np.int32)
    texts = [example.text for example in examples]
    tokens = encode_texts(tokenizer, texts)
    if beyond := sum(len(text) > longest for text in tokens):
        notes.append(
            f"the {split} split: {beyond:,} of {len(texts):,} texts are longer than "
            f"data.max_length {longest} tokens and are cut"
        )
    return ClassificationSplit(
        texts, RaggedArray.from_sequences([text[:longest] for text in tokens]), targets
    )
