import random

import pytest

from train.evaluation.metrics import Span, are_span_tags, extract_spans, score_spans


def tagged(prefixes: str) -> tuple[list[list[str]], list[list[str]]]:
    """Sixty sentences of random tags, and the same with a third of them drawn again."""
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
def test_spans_by_hand(tags: str, expected: list[tuple[int, int, str]]) -> None:
    assert list(extract_spans(tags.split())) == [Span(*span) for span in expected]


@pytest.mark.parametrize(
    ("prefixes", "expected", "predicted", "correct", "percent"),
    [("BI", 188, 190, 134, (70.53, 71.28, 70.90)), ("IE", 184, 190, 134, (70.53, 72.83, 71.66))],
)
def test_the_counts_are_those_of_conlleval(
    prefixes: str, expected: int, predicted: int, correct: int, percent: tuple[float, ...]
) -> None:
    """What conlleval (version 2004-01-26) prints of these tags, most of them against the scheme."""
    score = score_spans(*tagged(prefixes))
    assert (score.expected, score.predicted, score.correct) == (expected, predicted, correct)
    shown = tuple(round(100 * part, 2) for part in (score.precision, score.recall, score.f1))
    assert shown == percent


def test_a_span_ends_with_its_sentence() -> None:
    score = score_spans([["B-A"], ["I-A"]], [["B-A"], ["O"]])
    assert (score.correct, score.predicted, score.expected) == (1, 1, 2)


def test_a_span_must_have_its_words_and_its_type() -> None:
    right = [["B-A", "I-A", "O", "B-B"]]
    assert score_spans(right, [["B-A", "O", "O", "B-A"]]).correct == 0
    assert score_spans(right, right).f1 == 1
    assert score_spans(right, [["O"] * 4]).f1 == 0
    assert score_spans([["O"]], [["O"]]).f1 == 0


def test_tags_must_be_as_many_as_words() -> None:
    with pytest.raises(ValueError, match="sentence 1: 1 tags for 2 words"):
        score_spans([["O"], ["O", "O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="shorter"):
        score_spans([["O"], ["O"]], [["O"]])


def test_which_tags_spell_spans() -> None:
    assert are_span_tags(["O", "B-PER", "I-PER"])
    assert are_span_tags(["S-X"])
    assert not are_span_tags(["O"])
    assert not are_span_tags(["NOUN", "VERB"])
    assert not are_span_tags(["O", "B-PER", "-LRB-"])
