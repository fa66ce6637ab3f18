import subprocess
import sys
from collections.abc import Iterator

import pytest

from train.data.data_config import TokenizerConfig, TokenizerKind
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError

TEXT = "the cat sat on the mat\nthe Cat ran\n"


def test_byte_ids_are_the_bytes() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("byte"), [])
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (257, 256)
    assert tokenizer.end_token_ids == (256,)
    assert tokenizer.encode("a\n\x7fé").tolist() == [97, 10, 127, 0xC3, 0xA9]
    assert [len(tokenizer.decode([byte])) for byte in range(256)] == [1] * 256


def test_characters_are_sorted_and_separator_is_last() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("character"), ["cab\n", "aé"])
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (6, 5)
    assert tokenizer.encode("\nabcé").tolist() == [0, 1, 2, 3, 4]


def test_words_are_sorted_by_frequency() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("word"), [TEXT, "<unk> <eos> the the the the cat"])
    words = ["<unk>", "<eos>", "the", "cat", "Cat", "mat", "on", "ran", "sat"]
    assert tokenizer.vocab_size == len(words)
    assert (tokenizer.eos_token_id, tokenizer.end_token_ids) == (1, ())
    assert tokenizer.encode(" ".join(words)).tolist() == list(range(len(words)))
    assert tokenizer.encode("the dog\n \nsat").tolist() == [2, 0, 1, 1, 8]
    assert tokenizer.decode([2, 0, 1, 1, 8]) == "the <unk> \n \n sat"
    text = "it is n't , he said ."  # marks stay apart, as in the file
    tokenizer = train_tokenizer(TokenizerConfig("word"), [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_word_vocabulary_size() -> None:
    config = TokenizerConfig("word", vocab_size=8)
    for texts in ([TEXT], [TEXT, "<unk>"]):
        assert train_tokenizer(config, texts).vocab_size == 8
    assert train_tokenizer(config, ["one"]).vocab_size == 3


def test_bpe_merges_by_frequency() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("bpe", vocab_size=259), ["abab abab ab", " abc"])
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (259, 0)
    tokens = tokenizer.encode("abab ab").tolist()
    assert tokens == [257, 257, 258]  # "ab", then " ab"
    assert tokenizer.decode(tokens) == "abab ab"


def test_wordpiece_has_bert_special_tokens() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("wordpiece", vocab_size=64), [TEXT])
    assert tokenizer.eos_token_id == 3
    assert tokenizer.vocab_size <= 64
    tokens = tokenizer.encode("the Cat,  ran on a mat")  # no comma was learned
    assert tokens.tolist().count(1) == 1
    assert tokenizer.decode(tokens) == "the Cat ran on a mat"


def test_wordpiece_vocabulary_must_fit_the_alphabet() -> None:
    with pytest.raises(UserError, match=r"vocab_size: 15 is too small for the \d\d letters"):
        train_tokenizer(TokenizerConfig("wordpiece", vocab_size=15), [TEXT])


@pytest.mark.parametrize("kind", ["byte", "character", "word", "bpe", "wordpiece"])
def test_lower_case(kind: TokenizerKind) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind, vocab_size=300, lowercase=True), [TEXT])
    assert tokenizer.encode("The Cat").tolist() == tokenizer.encode("the cat").tolist()
    assert tokenizer.decode(tokenizer.encode("The Cat")) == "the cat"
    upright = train_tokenizer(TokenizerConfig(kind, vocab_size=300), [TEXT])
    assert upright.encode("the Cat").tolist() != upright.encode("the cat").tolist()


@pytest.mark.parametrize("kind", ["word", "bpe", "wordpiece"])
def test_training_reads_only_the_requested_characters(kind: TokenizerKind) -> None:
    def texts() -> Iterator[str]:
        yield "abc " * 3
        yield "abd " * 3
        raise AssertionError

    config = TokenizerConfig(kind, vocab_size=300, training_characters=16)
    learned = train_tokenizer(config, texts())
    assert learned.digest == train_tokenizer(config, ["abc " * 3, "abd "]).digest


def test_training_is_deterministic_across_processes() -> None:
    script = (
        "from train.data.data_config import TokenizerConfig as Config\n"
        "from train.data.tokenizer_training import train_tokenizer, __doc__ as text\n"
        "import train.data.data_config as config, train.data.tokenizer as tokenizer\n"
        "texts = [text, config.DataConfig.__doc__, tokenizer.Tokenizer.__doc__] * 5\n"
        "for kind in ('character', 'word', 'bpe', 'wordpiece'):\n"
        "    print(train_tokenizer(Config(kind, vocab_size=400), texts).digest)\n"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
    assert len(runs.pop().split()) == 4
