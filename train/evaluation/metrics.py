"""The share of right answers.

BLEU (Papineni et al. 2002) of a corpus, as sacreBLEU and as papers before it have it.

Precision, recall and F1 of the spans that tags spell out, by the rules of conlleval.

A tag is O, or a prefix and a type: B-PER. IOB1, IOB2 (BIO), IOBES and BILOU are read alike: a span
goes on as long as its type does, unless a tag says that it begins (B, S, U) or the one before said
that it ended (E, L, S, U). So any tags spell out some spans, also those of a model that has not
learned the scheme (Tjong Kim Sang and Buchholz 2000, whose script conlleval is).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


def accuracy(
    predicted: np.ndarray,  # [...]
    targets: np.ndarray,  # [...]
    weights: np.ndarray,  # [...], 0 where there is nothing to tell
) -> float:
    """The weighted share of answers that are right, in [0, 1].

    Raises:
      ValueError: The shapes differ, or nothing has any weight.
    """
    if not predicted.shape == targets.shape == weights.shape:
        raise ValueError(
            f"accuracy: shapes {predicted.shape}, {targets.shape} and {weights.shape} differ"
        )
    total = weights.sum(dtype=np.float64)
    if total == 0:
        raise ValueError("accuracy: no answer has any weight")
    return float(weights[predicted == targets].sum(dtype=np.float64) / total)


class BleuScore(NamedTuple):
    """A score and how it was made."""

    score: float
    """From 0 to 100."""
    signature: str
    """What sacreBLEU says of its settings and version, to be quoted with the score."""


def sacre_bleu(translations: Sequence[str], references: Sequence[str]) -> BleuScore:
    """BLEU of plain text in lower case, with sacreBLEU's own tokens (13a; Post 2018).

    Args:
      translations: One for each reference, not tokenised.
      references: One for each sentence.
    """
    return _bleu(translations, references, tokenize="13a", smooth="exp")


def tokenized_bleu(
    translations: Sequence[str], references: Sequence[str], language: str = "en"
) -> BleuScore:
    """BLEU in lower case over Moses tokens, comparable with what multi-bleu.perl says of such text.

    Both sides are put in lower case, their punctuation normalised and tokenised as Moses' scripts
    do, which is how the tokenised files that many papers score against were made.

    Args:
      translations: As in `sacre_bleu`.
      references: As in `sacre_bleu`.
      language: The code of their language ("de"), which decides about abbreviations and quotes.
    """
    return _bleu(
        list(moses_tokenize(translations, language)),
        list(moses_tokenize(references, language)),
        tokenize="none",
        smooth="none",
    )


def moses_tokenize(texts: Iterable[str], language: str) -> Iterator[str]:
    """Texts in lower case, punctuation normalised, with a space between any two Moses tokens."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    for text in texts:
        yield tokenizer.tokenize(normalizer.normalize(text.strip().lower()), return_str=True)


def _bleu(
    translations: Sequence[str], references: Sequence[str], *, tokenize: str, smooth: str
) -> BleuScore:
    from sacrebleu.metrics.bleu import BLEU

    if len(translations) != len(references):
        raise ValueError(f"{len(translations)} translations for {len(references)} references")
    # With `force`, text that looks like tokens is nothing to be warned of.
    metric = BLEU(lowercase=True, tokenize=tokenize, smooth_method=smooth, force=True)
    score = metric.corpus_score(translations, [references]).score
    return BleuScore(score, str(metric.get_signature()))


OUTSIDE_TAG = "O"


_TAG = re.compile(r"[BIESLU]-.+")


_BEGINS = frozenset("BSU")


_ENDS = frozenset("ESLU")


class Span(NamedTuple):
    """Some words of a sentence and what they are."""

    start: int
    end: int
    """One beyond the last word."""
    type: str


@dataclasses.dataclass(frozen=True)
class SpanScore:
    """Counts of spans, and what follows from them (0 where nothing was found or to be found)."""

    correct: int
    predicted: int
    expected: int

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        both = self.predicted + self.expected
        return 2 * self.correct / both if both else 0.0


def are_span_tags(tags: Iterable[str]) -> bool:
    """Whether these are the tags of spans: O and tags such as B-PER, at least one of them."""
    inside = set(tags) - {OUTSIDE_TAG}
    return bool(inside) and all(_TAG.fullmatch(tag) for tag in inside)


def score_spans(expected: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> SpanScore:
    """Compares the tags of sentences. A span is correct if its words and its type are.

    Raises:
      ValueError: The sentences, or the tags of one, are not as many.
    """
    counts = [0, 0, 0]
    for number, (right, given) in enumerate(zip(expected, predicted, strict=True)):
        if len(right) != len(given):
            raise ValueError(f"sentence {number}: {len(given)} tags for {len(right)} words")
        here, there = set(extract_spans(given)), set(extract_spans(right))
        counts = [n + len(s) for n, s in zip(counts, (here & there, here, there), strict=True)]
    return SpanScore(*counts)


def extract_spans(tags: Sequence[str]) -> Iterator[Span]:
    """The spans of a sentence, in order."""
    begin, before, kind = 0, OUTSIDE_TAG, ""
    for place, tag in enumerate([*tags, OUTSIDE_TAG]):
        prefix, _, type_ = tag.partition("-")
        follows = before != OUTSIDE_TAG and prefix != OUTSIDE_TAG and type_ == kind
        if not follows or prefix in _BEGINS or before in _ENDS:
            if before != OUTSIDE_TAG:
                yield Span(begin, place, kind)
            begin = place
        before, kind = prefix, type_
