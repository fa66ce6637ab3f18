"""Precision, recall and F1 of the spans that tags spell out, by the rules of conlleval.

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

OUTSIDE = "O"
_TAG = re.compile(r"[BIESLU]-.+")
_BEGINS = frozenset("BSU")
_ENDS = frozenset("ESLU")


class Span(NamedTuple):
    """Some words of a sentence and what they are."""

    begin: int
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


def spell_spans(tags: Iterable[str]) -> bool:
    """Whether these are the tags of spans: O and tags such as B-PER, at least one of them."""
    inside = set(tags) - {OUTSIDE}
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
        here, there = set(spans(given)), set(spans(right))
        counts = [n + len(s) for n, s in zip(counts, (here & there, here, there), strict=True)]
    return SpanScore(*counts)


def spans(tags: Sequence[str]) -> Iterator[Span]:
    """The spans of a sentence, in order."""
    begin, before, kind = 0, OUTSIDE, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, type_ = tag.partition("-")
        follows = before != OUTSIDE and prefix != OUTSIDE and type_ == kind
        if not follows or prefix in _BEGINS or before in _ENDS:
            if before != OUTSIDE:
                yield Span(begin, place, kind)
            begin = place
        before, kind = prefix, type_
