"""Metrics of answers: BLEU, F1 of labeled spans, and SQuAD's scores of answers."""

import collections
import dataclasses
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

OUTSIDE_TAG = "O"

_SPAN_TAG = re.compile(r"[BIESLU]-.+")
_STARTS_SPAN = frozenset("BSU")
_ENDS_SPAN = frozenset("ESLU")


class BleuScore(NamedTuple):
    """BLEU score of a corpus (Papineni et al. 2002)."""

    score: float
    """From 0 to 100."""
    signature: str
    """Settings and version of sacreBLEU, to be quoted with the score."""


def sacre_bleu(translations: Sequence[str], references: Sequence[str]) -> BleuScore:
    """Compute lower-case BLEU of untokenized texts with sacreBLEU's 13a tokens (Post 2018)."""
    return _bleu(translations, references, tokenize="13a", smooth="exp")


def tokenized_bleu(
    translations: Sequence[str], references: Sequence[str], language: str = "en"
) -> BleuScore:
    """Compute lower-case BLEU over Moses tokens, comparable with multi-bleu.perl.

    Both sides are lower-cased, and their punctuation is normalized and tokenized as Moses' scripts
    do for the language. The tokenized files that many papers score against were made in this way.
    """
    return _bleu(
        list(moses_tokenize(translations, language)),
        list(moses_tokenize(references, language)),
        tokenize="none",
        smooth="none",
    )


def moses_tokenize(texts: Iterable[str], language: str) -> Iterator[str]:
    """Yield texts lower-cased and normalized, with a space between Moses tokens."""
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
    # `force` turns off sacreBLEU's warning about text that looks tokenized.
    metric = BLEU(lowercase=True, tokenize=tokenize, smooth_method=smooth, force=True)
    score = metric.corpus_score(translations, [references]).score
    return BleuScore(score, str(metric.get_signature()))


class Span(NamedTuple):
    """Labelled span of words in a sentence."""

    start: int
    end: int
    """Index after the last word."""
    type: str


@dataclasses.dataclass(frozen=True)
class SpanScore:
    """Counts of spans, with their precision, recall and F1; 0 where a denominator is 0."""

    correct: int
    predicted: int
    expected: int

    @property
    def precision(self) -> float:
        """Fraction of the predicted spans that are correct."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Fraction of the expected spans that are predicted."""
        return self.correct / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        both = self.predicted + self.expected
        return 2 * self.correct / both if both else 0.0


def are_span_tags(tags: Iterable[str]) -> bool:
    """Return True for a tag set of spans: O and tags such as B-PER, at least one of these."""
    inside = set(tags) - {OUTSIDE_TAG}
    return bool(inside) and all(_SPAN_TAG.fullmatch(tag) for tag in inside)


def score_spans(expected: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> SpanScore:
    """Compare the tags of sentences. A span is correct if its words and its type are.

    Raises:
      ValueError: The numbers of sentences, or of the tags of a sentence, differ.
    """
    counts = [0, 0, 0]
    for number, (target, guess) in enumerate(zip(expected, predicted, strict=True)):
        if len(target) != len(guess):
            raise ValueError(f"sentence {number}: {len(guess)} tags for {len(target)} words")
        predicted_spans, expected_spans = set(extract_spans(guess)), set(extract_spans(target))
        sizes = (len(predicted_spans & expected_spans), len(predicted_spans), len(expected_spans))
        counts = [count + size for count, size in zip(counts, sizes, strict=True)]
    return SpanScore(*counts)


def extract_spans(tags: Sequence[str]) -> Iterator[Span]:
    """Yield the spans of a sentence in order, by the rules of conlleval.

    A tag is O, or a prefix and a type: B-PER. IOB1, IOB2 (BIO), IOBES and BILOU are read alike. A
    span continues as long as its type does, unless a tag starts a new one (B, S, U) or the tag
    before has ended it (E, L, S, U). Any tag sequence therefore has spans, also that of a model
    which has not learned the scheme (Tjong Kim Sang and Buchholz 2000, the authors of conlleval).
    """
    start, previous, current_type = 0, OUTSIDE_TAG, ""
    for index, tag in enumerate([*tags, OUTSIDE_TAG]):  # the last O ends an open span
        prefix, _, type_ = tag.partition("-")
        continues = previous != OUTSIDE_TAG and prefix != OUTSIDE_TAG and type_ == current_type
        if not continues or prefix in _STARTS_SPAN or previous in _ENDS_SPAN:
            if previous != OUTSIDE_TAG:
                yield Span(start, index, current_type)
            start = index
        previous, current_type = prefix, type_


class AnswerScore(NamedTuple):
    """Scores of an answer, from 0 to 1, by SQuAD's rules (Rajpurkar et al. 2016, section 6.1)."""

    exact_match: float
    f1: float
    """F1 of the words that both have."""


def score_answer(answer: str, references: Sequence[str]) -> AnswerScore:
    """Return the best scores of an answer over its references; none: it should be empty.

    As the official script of SQuAD 2.0 does, articles, punctuation and case do not count.
    """
    words = normalized_words(answer)
    # References without a word count only if there are no others.
    expected = [each for text in references if (each := normalized_words(text))] or [[]]
    f1 = max(_word_f1(words, each) for each in expected)
    return AnswerScore(float(words in expected), f1)


def normalized_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation, a, an and the."""
    text = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _word_f1(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = sum((collections.Counter(words) & collections.Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))
