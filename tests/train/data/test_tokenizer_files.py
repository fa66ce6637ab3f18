import json
import pathlib

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from train.data.tokenizer import Tokenizer
from train.errors import UserError


@pytest.fixture
def gpt2(tmp_path: pathlib.Path) -> pathlib.Path:
    """A vocabulary in GPT-2's form; a space is Ġ there."""
    words = ["a", "b", "Ġ", "ab", "Ġab", "<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    return tmp_path


def test_gpt2_files(gpt2: pathlib.Path) -> None:
    tokenizer = Tokenizer.load(gpt2)
    assert tokenizer.encode("ab ab ba").tolist() == [3, 4, 2, 1, 0]
    assert tokenizer.decode([3, 4, 5]) == "ab ab"
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (5, 6)
    (gpt2 / "encoder.json").rename(gpt2 / "vocab.json")
    assert Tokenizer.load(gpt2).digest == tokenizer.digest


@pytest.mark.parametrize(("name", "tokens"), [("GPT2Tokenizer", 3), ("GPTNeoXTokenizer", 2)])
def test_class_of_a_tokenizer_decides_whether_texts_are_normalized(
    name: str, tokens: int, tmp_path: pathlib.Path
) -> None:
    """NFC makes one character, of two bytes, from e (one byte) and an accent (two)."""
    words = ["e", "Ì", "ģ", "Ã", "©", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    assert len(Tokenizer.load(tmp_path).encode("e\u0301")) == tokens


@pytest.mark.parametrize("cased", [False, True])
def test_bert_vocabulary(tmp_path: pathlib.Path, cased: bool) -> None:
    words = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able", "a", ","]
    if cased:
        words.append("Un")
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    for path in (tmp_path, tmp_path / "vocab.txt"):
        tokenizer = Tokenizer.load(path)
        tokens = [10, 7, 9, 2] if cased else [6, 7, 9, 8]
        assert tokenizer.encode("Unable,  ä").tolist() == tokens
        assert tokenizer.decode([4, 6, 7, 9, 8, 4]) == "unable, a"
        assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (4, len(words))


def test_tokenizer_json_without_padding_and_truncation(tmp_path: pathlib.Path) -> None:
    backend = Backend(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    backend.post_processor = processors.TemplateProcessing(
        "<eos> $0", special_tokens=[("<eos>", 0)]
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(1)
    backend.enable_padding(length=5)
    (tmp_path / "mine.json").write_text(backend.to_str())
    tokenizer = Tokenizer.load(tmp_path / "mine.json")
    encoded = tokenizer.encode_documents(["a a", "a"])
    assert [tokens.tolist() for tokens in encoded] == [[1, 1], [1]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: damaged"),
        ({"encoder.json": "{", "merges.txt": ""}, r"encoder\.json: not JSON"),
        ({"encoder.json": '{"a": 0}', "merges.txt": "a b"}, r"merges\.txt: damaged"),
        ({"encoder.json": '{"a": 0}', "merges.txt": "a\n"}, r"merges\.txt: damaged"),
        ({"encoder.json": '{"a": 0}', "merges.txt": ""}, "no token that separates documents"),
        ({"vocab.txt": "[SEP]\na"}, r"vocab\.txt: has no \[UNK\]"),
        ({"merges.txt": "a b"}, "has no tokenizer; it needs"),
        ({}, "has no tokenizer; it needs"),
    ],
    ids=["empty", "json", "unknown", "single", "separator", "bert", "half", "nothing"],
)
def test_invalid_tokenizer_files_are_errors(
    tmp_path: pathlib.Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)


def test_missing_or_binary_tokenizer_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: does not exist"):
        Tokenizer.load(tmp_path / "nowhere.json")
    (tmp_path / "vocab.txt").write_bytes(b"[UNK]\n\xff")
    with pytest.raises(UserError, match="not UTF-8 at byte 6"):
        Tokenizer.load(tmp_path / "vocab.txt")
