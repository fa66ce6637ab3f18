import random

import pytest

from train.tasks.metrics import (
    Span,
    are_span_tags,
    extract_spans,
    moses_tokenize,
    sacre_bleu,
    score_spans,
    tokenized_bleu,
)

TRANSLATIONS = [
    "Ein Mann mit Hut fährt auf der Straße.",
    "Zwei Hunde, die „spielen“, laufen durch den Schnee!",
    "Ein Kind isst z.B. Eis.",
    "Die U-Bahn ist leer.",
    'Eine Frau sagt: "Hallo!"',
]
REFERENCES = [
    "Ein Mann mit einem Hut fährt auf der Straße.",
    "Zwei Hunde, die „spielen“, rennen durch den Schnee.",
    "Ein Kind isst z.B. ein Eis.",
    "Die U-Bahn ist heute leer.",
    'Eine alte Frau sagt: "Hallo!"',
]


def test_moses_tokens() -> None:
    assert list(moses_tokenize(TRANSLATIONS[1:3], "de")) == [
        "zwei hunde , die &quot; spielen &quot; , laufen durch den schnee !",
        "ein kind isst z.b. eis .",
    ]


def test_tokenized_bleu_matches_multi_bleu() -> None:
    """multi-bleu.perl -lc says BLEU = 63.96 (BP=0.907, hyp_len=41, ref_len=45) of these tokens."""
    bleu = tokenized_bleu(TRANSLATIONS, REFERENCES, "de")
    assert round(bleu.score, 2) == 63.96
    assert "case:lc" in bleu.signature
    assert "tok:none|smooth:none" in bleu.signature


def test_sacre_bleu_tokens_and_signature() -> None:
    bleu = sacre_bleu(TRANSLATIONS, REFERENCES)
    assert round(bleu.score, 2) == 65.09
    assert bleu.signature.startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:")


def test_bleu_ignores_case() -> None:
    shouted = [text.upper().replace("STRASSE", "Straße") for text in REFERENCES]
    for score in (sacre_bleu, tokenized_bleu):
        assert score(shouted, REFERENCES).score == pytest.approx(100)
        assert score(REFERENCES, REFERENCES).score == pytest.approx(100)


def test_one_pair_of_one_word_in_four() -> None:
    """BP · (p1 · p2 · p3 · p4)^¼ with p = 3/4, 2/3, 1/2 and 0, or half of 1 for the 4-gram."""
    assert tokenized_bleu(["a b c x"], ["a b c d"]).score == 0
    expected = 100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25
    assert sacre_bleu(["a b c x"], ["a b c d"]).score == pytest.approx(expected)
    with pytest.raises(ValueError, match="1 translations for 2 references"):
        sacre_bleu(["a"], ["a", "b"])


def tagged(prefixes: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return sixty sentences of random tags, and the same with a third of them redrawn."""
    draw = random.Random(11)
    tags = ["O", *(f"{prefix}-{type_}" for prefix in prefixes for type_ in ("PER", "LOC"))]
    right = [[draw.choice(tags) for _ in range(draw.randrange(1, 9))] for _ in range(60)]
    given = [[tag if draw.random() < 0.7 else draw.choice(tags) for tag in row] for row in right]
    return right, given


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", []),
        ("B-A I-A O B-B", [(0, 2, "A"), (3, 4, "B")]),
        ("B-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]),
        ("I-A I-A I-B O I-A", [(0, 2, "A"), (2, 3, "B"), (4, 5, "A")]),
        ("B-A I-B", [(0, 1, "A"), (1, 2, "B")]),
        ("S-A S-A B-A E-A", [(0, 1, "A"), (1, 2, "A"), (2, 4, "A")]),
        ("B-A I-A E-A I-A", [(0, 3, "A"), (3, 4, "A")]),
        ("E-A E-A", [(0, 1, "A"), (1, 2, "A")]),
        ("U-A B-A L-A L-B", [(0, 1, "A"), (1, 3, "A"), (3, 4, "B")]),
        ("B-A-1 I-A-1", [(0, 2, "A-1")]),
    ],
)
def test_span_scores_match_hand_computed_values(
    tags: str, expected: list[tuple[int, int, str]]
) -> None:
    assert list(extract_spans(tags.split())) == [Span(*span) for span in expected]


@pytest.mark.parametrize(
    ("prefixes", "expected", "predicted", "correct", "percent"),
    [("BI", 188, 190, 134, (70.53, 71.28, 70.90)), ("IE", 184, 190, 134, (70.53, 72.83, 71.66))],
)
def test_span_counts_match_conlleval(
    prefixes: str, expected: int, predicted: int, correct: int, percent: tuple[float, ...]
) -> None:
    """Output of conlleval (version 2004-01-26) for these tags, most of them against the scheme."""
    score = score_spans(*tagged(prefixes))
    assert (score.expected, score.predicted, score.correct) == (expected, predicted, correct)
    shown = tuple(round(100 * part, 2) for part in (score.precision, score.recall, score.f1))
    assert shown == percent


def test_spans_end_with_the_sentence() -> None:
    score = score_spans([["B-A"], ["I-A"]], [["B-A"], ["O"]])
    assert (score.correct, score.predicted, score.expected) == (1, 1, 2)


def test_span_needs_equal_words_and_type() -> None:
    right = [["B-A", "I-A", "O", "B-B"]]
    assert score_spans(right, [["B-A", "O", "O", "B-A"]]).correct == 0
    assert score_spans(right, right).f1 == 1
    assert score_spans(right, [["O"] * 4]).f1 == 0
    assert score_spans([["O"]], [["O"]]).f1 == 0


def test_number_of_tags_must_match() -> None:
    with pytest.raises(ValueError, match="sentence 1: 1 tags for 2 words"):
        score_spans([["O"], ["O", "O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="shorter"):
        score_spans([["O"], ["O"]], [["O"]])


def test_span_tags_are_recognized() -> None:
    assert are_span_tags(["O", "B-PER", "I-PER"])
    assert are_span_tags(["S-X"])
    assert not are_span_tags(["O"])
    assert not are_span_tags(["NOUN", "VERB"])
    assert not are_span_tags(["O", "B-PER", "-LRB-"])
