import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data import listops
from train.data.listops import (
    ListOpsDataConfig,
    draw_expression,
    generate_examples,
    prepare_listops,
)
from train.errors import UserError

PYTHON = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}


def small(**changes: Any) -> ListOpsDataConfig:
    settings: dict[str, Any] = dict(
        train_examples=40, validation_examples=7, test_examples=5, min_length=8, max_length=30
    )
    return ListOpsDataConfig(**settings | changes)


def value_by_python(text: str) -> int:
    """Evaluate the text in Python: [MIN 3 4 ] is MIN((3,4,))."""
    words = [
        f"{word[1:]}((" if word.startswith("[") else "))," if word == "]" else f"{word},"
        for word in text.split()
    ]
    return eval("".join(words).rstrip(","), {"__builtins__": {}}, PYTHON)


def nesting(text: str) -> tuple[int, set[int]]:
    """Return the depth of an expression, and the numbers of arguments of its operators."""
    open_counts, counts, depth = [0], set(), 0
    for token in text.split():
        if token == "]":
            counts.add(open_counts.pop())
            continue
        open_counts[-1] += 1
        depth = max(depth, len(open_counts))
        if token.startswith("["):
            open_counts.append(0)
    assert open_counts == [1]
    return depth, counts


@pytest.mark.parametrize(
    ("draws", "text", "value"),
    [
        (
            # [MED of 2 + floor(0.12 * 9) = 3 arguments: 9, [SM 8 7 ] and 0
            [0.2, 0.5, 0.12, 0.25, 0.99, *(0.0, 0.75, 0.0, 0.3, 0.85, 0.9, 0.71), 0.7, 0.0],
            "[MED 9 [SM 8 7 ] 0 ]",
            5,
        ),
        ([0.1, 0.24, 0.99, *[0.3, 0.19] * 9, 0.9, 0.2], "[MIN 1 1 1 1 1 1 1 1 1 2 ]", 1),
        ([0.1, 0.25, 0.11, 0.3, 0.49, 0.3, 0.69], "[MAX 4 6 ]", 6),
        ([0.1, 0.74, 0.0, 0.3, 0.49, 0.3, 0.69], "[MED 4 6 ]", 5),
    ],
)
def test_expression_matches_hand_computed_value(draws: list[float], text: str, value: int) -> None:
    """Draws in order: operator if below 1/4; which operator; number of arguments; digit."""
    tokens: list[str] = []
    left = iter(draws)
    actual = draw_expression(lambda: next(left), ListOpsDataConfig(), tokens)
    assert " ".join(tokens) == text
    assert (actual, list(left)) == (value, [])


def test_values_match_python() -> None:
    actual = list(itertools.islice(generate_examples(small(max_length=200)), 300))
    assert [int(each.label) for each in actual] == [value_by_python(each.text) for each in actual]
    assert {each.label for each in actual} == set("0123456789")


def test_depths_arguments_and_lengths_are_within_limits() -> None:
    config = small(min_length=20, max_length=40, max_depth=4, max_arguments=5)
    texts = [example.text for example in itertools.islice(generate_examples(config), 300)]
    depths, counts = zip(*map(nesting, texts), strict=True)
    assert max(depths) == 4
    assert set.union(*counts) == {2, 3, 4, 5}
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths), max(lengths)) == (21, 39)


def test_examples_depend_on_the_seed_only() -> None:
    first, second = itertools.islice(generate_examples(small()), 2)
    assert [first[:2], second[:2]] == [
        ("2", "[MIN 3 [MIN 5 5 6 7 7 2 5 ] ]"),
        ("4", "[SM 3 3 6 0 [MIN 9 9 7 ] 1 4 ]"),
    ]
    assert prepare_listops(small()).digest == prepare_listops(small()).digest
    assert prepare_listops(small()).digest != prepare_listops(small(generator_seed=1)).digest


def test_splits_are_disjoint() -> None:
    corpus = prepare_listops(small())
    texts = {name: list(split.texts) for name, split in corpus.splits.items()}
    assert {name: len(found) for name, found in texts.items()} == {
        "train": 40,
        "validation": 7,
        "test": 5,
    }
    assert len(set(itertools.chain.from_iterable(texts.values()))) == 52
    more = prepare_listops(small(train_examples=60))
    for name in ("validation", "test"):
        assert list(more.split(name).texts) == texts[name]


def test_batch() -> None:
    corpus = prepare_listops(small())
    assert corpus.labels == tuple("0123456789")
    assert (corpus.tokenizer.vocab_size, corpus.notes) == (17, ())  # 15 words, <unk> and <eos>
    split = corpus.split("train")
    batch = split.batch(np.array([3, -1]), (32,))
    text = split.texts[3]
    size = len(text.split())
    assert batch["segments"].tolist() == [[1] * (size + 1) + [0] * (31 - size), [0] * 32]
    assert batch["tokens"][0, 0] == corpus.tokenizer.cls_token_id
    assert corpus.tokenizer.decode(batch["tokens"][0, 1 : size + 1]) == text
    assert batch["targets"].tolist() == [value_by_python(text), 0]
    assert split.lengths.max() <= 30


def test_published_files_are_read(tmp_path: Path) -> None:
    head = "Source\tTarget\n"
    rows = [("( ( ( [MAX 4 ) 8 ) ] )", 8), ("( ( ( ( [SM 7 ) 8 ) 9 ) ] )", 4), ("3", 3)]
    train, test = tmp_path / "basic_train.tsv", tmp_path / "basic_test.tsv"
    train.write_text(head + "".join(f"{text}\t{value}\n" for text, value in rows))
    test.write_text(f"{head}( ( ( [MIN 4 ) 8 ) ] )\t4\n")
    kwargs: Any = dict(path=str(train), validation_path=str(test), test_path=str(test))
    corpus = prepare_listops(small(**kwargs))
    assert corpus.split("train").texts == ["[MAX 4 8 ]", "[SM 7 8 9 ]", "3"]
    assert corpus.split("train").targets.tolist() == [8, 4, 3]
    assert corpus.split("test").texts == ["[MIN 4 8 ]"]
    assert len(prepare_listops(small(path=str(train))).split("validation").texts) == 1
    train.write_text(f"{head}3\t12\n4\t4\n")
    with pytest.raises(UserError, match=r"basic_train\.tsv:2: label '12' is not among those"):
        prepare_listops(small(**kwargs))


def test_too_few_expressions_of_a_length_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listops, "MAX_FAILED_DRAWS", 5000)
    few: Any = dict(min_length=3, max_length=5, max_arguments=2)  # 4 operators of 100 pairs
    assert len(prepare_listops(small(train_examples=50, **few)).split("train").texts) == 50
    with pytest.raises(UserError, match=r"data\.min_length 3: none of 5,000 .* was new.* lower it"):
        prepare_listops(small(train_examples=400, **few))
    with pytest.raises(UserError, match=r"data\.min_length 12: none of 5,000 expressions"):
        prepare_listops(small(min_length=12, max_depth=2))
