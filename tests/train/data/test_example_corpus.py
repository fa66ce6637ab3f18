import pytest

from train.data.config import TokenizerConfig
from train.data.example_configs import ExampleDataConfig
from train.data.examples import (
    ExampleCorpus,
    choose_held_out_examples,
    corpus_digest,
    read_splits,
    tokenizer_for_splits,
    with_leading_space,
)
from train.errors import UserError


def numbered(setting: str, path: str) -> list[str]:
    """Twenty examples that say where they are from."""
    return [f"{setting}:{path}:{number}" for number in range(20)]


def test_each_path_is_a_split() -> None:
    config = ExampleDataConfig(path="a", validation_path="b", test_path="c")
    splits = read_splits(config, numbered)
    assert {name: (len(split), split[0]) for name, split in splits.items()} == {
        "train": (20, "data.path:a:0"),
        "validation": (20, "data.validation_path:b:0"),
        "test": (20, "data.test_path:c:0"),
    }


def test_validation_is_held_out_by_the_seed() -> None:
    def held_out(seed: int) -> list[str]:
        config = ExampleDataConfig(path="a", validation_fraction=0.25, split_seed=seed)
        splits = read_splits(config, numbered)
        assert list(splits) == ["train", "validation"]
        assert sorted([*splits["train"], *splits["validation"]]) == sorted(
            numbered("data.path", "a")
        )
        return list(splits["validation"])

    assert len(held_out(0)) == 5
    assert held_out(0) == held_out(0) != held_out(1)


def test_who_is_drawn_stays_what_it_was() -> None:
    assert sorted(choose_held_out_examples(20, 0.25, 0)) == [3, 7, 9, 11, 18]


@pytest.mark.parametrize(("fraction", "drawn"), [(0.01, 1), (0.5, 2), (0.99, 2)])
def test_something_is_drawn_and_something_is_not(fraction: float, drawn: int) -> None:
    assert len(choose_held_out_examples(3, fraction, 0)) == drawn


def test_one_example_cannot_be_divided() -> None:
    with pytest.raises(UserError, match=r"data\.path a: one example .* set data\.validation_path"):
        read_splits(ExampleDataConfig(path="a"), lambda setting, path: [setting])


def test_a_split_that_is_not_there() -> None:
    tokenizer = tokenizer_for_splits(TokenizerConfig("byte"), {"train": []})
    corpus = ExampleCorpus(tokenizer, {"train": "x", "validation": "y"}, "")
    assert corpus.split("validation") == "y"
    with pytest.raises(UserError, match=r"only train, validation; set data\.test_path"):
        corpus.split("test")
    with pytest.raises(UserError, match="choose one of these"):
        corpus.split("dev")


def test_a_tokenizer_is_learned_from_the_training_split() -> None:
    texts = {"train": ["one two two"], "validation": ["three"]}
    word = tokenizer_for_splits(TokenizerConfig("word"), texts)
    assert word.decode(word.encode("two three")) == "two <unk>"
    character = tokenizer_for_splits(TokenizerConfig("character"), texts)
    assert character.decode(character.encode("three")) == "three"


def test_the_digest_tells_corpora_apart() -> None:
    byte = tokenizer_for_splits(TokenizerConfig("byte"), {"train": []})
    lower = tokenizer_for_splits(TokenizerConfig("byte", lowercase=True), {"train": []})
    digests = {
        corpus_digest(byte, {"train": ["a"], "test": ["b"]}),
        corpus_digest(byte, {"train": ["a", "b"], "test": []}),
        corpus_digest(lower, {"train": ["a"], "test": ["b"]}),
    }
    assert len(digests) == 3
    assert corpus_digest(byte, {"train": [("a",)]}) == corpus_digest(byte, {"train": [["a"]]})


def test_a_word_is_the_same_wherever_it_stands() -> None:
    assert with_leading_space(["a b ", "\tc"]) == [" a b", " c"]
