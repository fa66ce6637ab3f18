"""BLEU (Papineni et al. 2002) of a corpus, as sacreBLEU and as papers before it have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Bleu(NamedTuple):
    """A score and how it was made."""

    score: float
    """From 0 to 100."""
    signature: str
    """What sacreBLEU says of its settings and version, to be quoted with the score."""


def sacre_bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of plain text in lower case, with sacreBLEU's own tokens (13a; Post 2018).

    Args:
      translations: One for each reference, not tokenised.
      references: One for each sentence.
    """
    return _bleu(translations, references, tokenize="13a", smooth="exp")


def tokenised_bleu(
    translations: Sequence[str], references: Sequence[str], language: str = "en"
) -> Bleu:
    """BLEU in lower case over Moses tokens, comparable with what multi-bleu.perl says of such text.

    Both sides are put in lower case, their punctuation normalised and tokenised as Moses' scripts
    do, which is how the tokenised files that many papers score against were made.

    Args:
      translations: As in `sacre_bleu`.
      references: As in `sacre_bleu`.
      language: The code of their language ("de"), which decides about abbreviations and quotes.
    """
    return _bleu(
        list(moses_tokens(translations, language)),
        list(moses_tokens(references, language)),
        tokenize="none",
        smooth="none",
    )


def moses_tokens(texts: Iterable[str], language: str) -> Iterator[str]:
    """Texts in lower case, punctuation normalised, with a space between any two Moses tokens."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    for text in texts:
        yield tokenizer.tokenize(normalizer.normalize(text.strip().lower()), return_str=True)


def _bleu(
    translations: Sequence[str], references: Sequence[str], *, tokenize: str, smooth: str
) -> Bleu:
    from sacrebleu.metrics.bleu import BLEU

    if len(translations) != len(references):
        raise ValueError(f"{len(translations)} translations for {len(references)} references")
    # With `force`, text that looks like tokens is nothing to be warned of.
    metric = BLEU(lowercase=True, tokenize=tokenize, smooth_method=smooth, force=True)
    score = metric.corpus_score(translations, [references]).score
    return Bleu(score, str(metric.get_signature()))
