"""What can be learned, as settings. Imports nothing that computes."""

import dataclasses
from typing import Literal

from transformer.config import Pooling
from transformer.validation import check_at_least, check_fraction


@dataclasses.dataclass(frozen=True)
class LanguageModeling:
    """The next token of every token."""


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModeling:
    """The words that were hidden, from those around them (Devlin et al. 2019, section 3.1)."""

    mlm_probability: float = 0.15
    """Share of the tokens that the model has to tell."""
    mask_replace_prob: float = 0.8
    """Share of those that are shown as a mask."""
    random_replace_prob: float = 0.1
    """Share of those that are shown as some other token; the rest are shown as they are."""

    def __post_init__(self) -> None:
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"task.mlm_probability {self.mlm_probability}: give a share in (0, 1]")
        if (
            min(self.mask_replace_prob, self.random_replace_prob) < 0
            or self.mask_replace_prob + self.random_replace_prob > 1
        ):
            raise ValueError(
                f"task.mask_replace_prob {self.mask_replace_prob}, task.random_replace_prob {self.random_replace_prob}: give shares from 0 on "
                "that are at most 1 together"
            )


@dataclasses.dataclass(frozen=True)
class Classification:
    """The class of each text."""

    num_labels: int = 0
    """C; 0: as many as the training data have."""
    pooling: Pooling = "first"
    """What the class is told from: the first token, put there for it, or the mean of all."""
    classifier_dropout: float = 0.0
    """Of the pooled vector."""

    def __post_init__(self) -> None:
        check_at_least("task.num_labels", self.num_labels, 0)
        check_fraction("task.classifier_dropout", self.classifier_dropout)


@dataclasses.dataclass(frozen=True)
class Tagging:
    """The tag of each word, told at its first piece."""

    num_labels: int = 0
    """C, the number of tags; 0: as many as the training data have."""
    classifier_dropout: float = 0.0
    """Of each token's vector."""

    def __post_init__(self) -> None:
        check_at_least("task.num_labels", self.num_labels, 0)
        check_fraction("task.classifier_dropout", self.classifier_dropout)


@dataclasses.dataclass(frozen=True)
class Translation:
    """The text in another language."""

    label_smoothing: float = 0.1
    """Share of a target that is spread evenly over all words (Vaswani et al. 2017, section 5.4)."""
    num_beams: int = 5
    """Hypotheses that are kept at each step of the search; 1: the likeliest word each time."""
    length_penalty: float = 0.6
    """A hypothesis of n tokens is worth log p / ((5 + n) / 6)^this (Wu et al. 2016, section 7)."""
    extra_length: int = 50
    """Translations have at most so many tokens more than their source."""
    compute_bleu: Literal["end", "always"] = "end"
    """When translations are written and scored: at the end of a run, or at every evaluation too.
    Otherwise evaluations on the way tell the loss alone."""

    def __post_init__(self) -> None:
        check_fraction("task.label_smoothing", self.label_smoothing)
        check_at_least("task.num_beams", self.num_beams, 1)
        check_at_least("task.length_penalty", self.length_penalty, 0)
        check_at_least("task.extra_length", self.extra_length, 0)


TaskConfig = LanguageModeling | MaskedLanguageModeling | Classification | Tagging | Translation
"""What a run learns."""
