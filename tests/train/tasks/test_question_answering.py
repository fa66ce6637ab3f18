"""Spans of answers, and pairs of texts as tokens."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.tasks.question_answering import best_span, split_prompt


def test_best_span_has_the_largest_sum_of_both_logits() -> None:
    logits = np.random.RandomState(0).normal(size=(9, 2))
    spans = [(i, j) for i, j in itertools.product(range(9), repeat=2) if 0 <= j - i < 3]
    expected = max(spans, key=lambda span: logits[span[0], 0] + logits[span[1], 1])
    assert best_span(logits, 3) == expected


def test_prompt_is_a_question_and_a_context() -> None:
    assert split_prompt("Who?\nKeats.\nHe wrote it.") == ("Who?", "Keats.\nHe wrote it.")
    with pytest.raises(UserError, match="has no context"):
        split_prompt("Who wrote it?")


def test_pair_has_the_tokens_and_types_of_bert(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "who", "?", "keats", "wrote"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    pair = Tokenizer.load(str(tmp_path)).encode_pair("Who?", "Keats  wrote")
    assert pair.tokens.tolist() == [2, 4, 5, 3, 6, 7, 3]
    assert pair.types.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert pair.start == 4
    assert pair.spans == ((0, 5), (7, 12))


def test_pair_has_two_tokens_between_texts_of_mpnet(tmp_path: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "[UNK]", "who", "keats"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MPNetTokenizer"}')
    pair = Tokenizer.load(str(tmp_path)).encode_pair("who", "keats")
    assert pair.tokens.tolist() == [0, 4, 2, 2, 5, 2]
    assert pair.types.tolist() == [0, 0, 0, 0, 0, 0]
