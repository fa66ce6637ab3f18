"""Texts and the classes that they belong to, for classifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from train.data.batches import example_numbers
from train.data.example_config import ExampleDataConfig
from train.data.example_corpus import (
    ExampleCorpus,
    class_numbers,
    digest_of,
    obtain_tokenizer,
    read_splits,
    spaced,
)
from train.data.labelled_config import LabelledDataConfig
from train.data.labelled_files import Labelled, read_labelled
from train.data.ragged import Ragged
from train.data.tokenizer import Tokenizer
from train.data.windows import Batch


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledSplit:
    """The texts of a split, each with a token before it whose vector can stand for the whole."""

    texts: Sequence[str]
    tokens: Ragged
    targets: np.ndarray  # [n] int32
    """The number of each text's class."""

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Tokens of each text."""
        return self.tokens.lengths[:, None]

    def batch(
        self,
        numbers: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> Batch:
        """Some texts, padded to T tokens.

        Returns:
          tokens: [B, T] int32.
          segments: [B, T] int32, 1 where they are no padding.
          targets: [B] int32, the classes.
          weights: [B] float32, 1 unless the row is empty.
          examples: [B] uint32, the numbers of the texts within the split.
        """
        tokens, real = self.tokens.padded(numbers, lengths[0])
        return {
            "tokens": tokens,
            "segments": real.astype(np.int32),
            "targets": np.where(numbers < 0, 0, self.targets[numbers]),
            "weights": (numbers >= 0).astype(np.float32),
            "examples": example_numbers(np.maximum(numbers, 0)),
        }


def prepare_labelled(
    config: LabelledDataConfig,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
) -> ExampleCorpus[LabelledSplit]:
    """Reads and encodes the texts that ``config`` names.

    Args:
      config: Which files, which tokenizer.
      tokenizer: Used in place of what ``config.tokenizer`` describes.
      labels: The names of the classes by number; those of ``config.path``, sorted, if None.

    Raises:
      UserError: A file is missing, empty or not encoded as the settings say, a line is not as
        they say, or a label is none of the classes.
    """
    splits = read_splits(config, lambda setting, path: list(read_labelled(config, setting, path)))
    training = [*splits["train"], *([] if config.validation_path else splits["validation"])]
    names = labels or sorted({example.label for example in training})
    return labelled_corpus(config, splits, names, tokenizer)


def labelled_corpus(
    config: ExampleDataConfig,
    splits: Mapping[str, Sequence[Labelled]],
    names: Sequence[str],
    tokenizer: Tokenizer | None = None,
) -> ExampleCorpus[LabelledSplit]:
    """Encodes texts that have been read; ``names`` are those of the classes, by number."""
    tokenizer = tokenizer or obtain_tokenizer(
        config.tokenizer,
        {split: spaced(example.text for example in found) for split, found in splits.items()},
    )
    notes: list[str] = []
    encoded = {
        split: _encode(split, found, tokenizer, names, config.max_length, notes)
        for split, found in splits.items()
    }
    content = {split: [example[:2] for example in found] for split, found in splits.items()}
    digest = digest_of(tokenizer, {"labels": tuple(names), **content})
    return ExampleCorpus(tokenizer, encoded, digest, tuple(names), tuple(notes))


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:  # each [T] int32
    """The tokens of texts as a classifier reads them: after the one that stands for the whole."""
    first = np.array([tokenizer.start])
    return [
        np.concatenate([first, tokens]).astype(np.int32)
        for tokens in tokenizer.encode_documents(spaced(texts))
    ]


def _encode(
    split: str,
    examples: Sequence[Labelled],
    tokenizer: Tokenizer,
    names: Sequence[str],
    longest: int,
    notes: list[str],
) -> LabelledSplit:
    """Encodes a split; what is said of its texts goes to ``notes``."""
    labels = ((example.label, example.place) for example in examples)
    targets = np.array(class_numbers(labels, names, "label"), np.int32)
    texts = [example.text for example in examples]
    tokens = encode_texts(tokenizer, texts)
    if beyond := sum(len(text) > longest for text in tokens):
        notes.append(
            f"the {split} split: {beyond:,} of {len(texts):,} texts are longer than "
            f"data.max_length {longest} tokens and are cut"
        )
    return LabelledSplit(texts, Ragged.of([text[:longest] for text in tokens]), targets)
