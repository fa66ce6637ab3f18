"""Articles by gender: which choices are counted, and the tables of a tiny translator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from bench import articles
from bench.articles import NOUNS, Choice, accuracy_rows, choices_of, held_out_choices, main
from tests.train.support import light_compiler as light_compiler
from tests.train.tasks.support import tiny_translator

TOKENS = {"indefinite": {"ein": 3, "eine": 4}, "definite": {"der": 5, "die": 6, "das": 7}}


def test_choices_are_among_the_forms_of_the_reference() -> None:
    targets = np.array([[3, 1, 7, 0], [4, 6, 0, 0]])
    weights = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])  # the "die" is padding
    logits, blind = np.zeros((2, 2, 4, 9))
    logits[..., 8] = 9  # no article: cannot be chosen
    logits[0, 0, 3] = logits[0, 2, 6] = logits[1, 0, 4] = 1
    blind[0, 0, 4] = blind[0, 2, 7] = blind[1, 0, 4] = 1
    assert list(choices_of(logits, blind, targets, weights, TOKENS)) == [
        Choice("indefinite", True, "ein", "ein", "eine"),
        Choice("indefinite", True, "eine", "eine", "eine"),
        Choice("definite", False, "das", "die", "das"),
    ]


def test_accuracies() -> None:
    rows = [
        Choice("definite", True, "der", "der", "die"),
        Choice("definite", True, "die", "der", "die"),
        Choice("definite", False, "die", "die", "das"),
        Choice("definite", False, "die", "die", "die"),
    ]
    found = list(accuracy_rows(rows))
    assert found == [
        ("definite, first word", 2, 50.0, 50.0, 50.0),
        ("definite, anywhere", 4, 75.0, 75.0, 50.0),
    ]


def test_nouns_have_one_gender() -> None:
    every = [noun for nouns in NOUNS.values() for noun in nouns]
    assert len(set(every)) == len(every) == 60


@pytest.mark.full
def test_tables_of_a_translator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its language has the articles "das" and "ein" alone, so it cannot choose wrongly."""
    monkeypatch.setattr(articles, "NOUNS", {"das": ("cat", "dog")})
    run = train.fit(tiny_translator(tmp_path, steps=1), tmp_path / "run")
    choices = held_out_choices(run, "test")
    text = (tmp_path / "test.de").read_text(encoding="utf-8").split()
    assert len(choices) == text.count("das") + text.count("ein")
    assert all(each.chosen == each.reference for each in choices)
    forms: dict[str, Any] = {"definite": ("der", "die", "das"), "indefinite": ("ein", "eine")}
    tokens = {kind: dict.fromkeys(names, 5) for kind, names in forms.items()}
    monkeypatch.setattr(articles, "article_tokens", lambda tokenizer: tokens)
    main(str(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "nouns with an error" in shown
    assert shown.count("│ 2 ") == 2
