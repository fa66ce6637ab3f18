import hypothesis
import hypothesis.strategies as st
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from train.data.config import TokenizerConfig, TokenizerKind
from train.data.text_chunks import can_be_chunked, split_into_chunks
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer

SAMPLE = (
    "It's  the cat's\n\n\tmat, isn't it?  Über-naïve 12 345 ... 日本 語  \n def f(x):\n    return\n"
)
KINDS: tuple[TokenizerKind, ...] = ("byte", "character", "word", "bpe", "wordpiece")


def test_a_text_is_cut_before_the_space_after_a_word() -> None:
    assert list(split_into_chunks("one  two\nthree four", 4)) == ["one  two", "\nthree", " four"]
    assert list(split_into_chunks("", 4)) == [""]
    assert list(split_into_chunks("uncuttable", 1)) == ["uncuttable"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    config = TokenizerConfig(request.param, vocab_size=300)
    return train_tokenizer(config, [SAMPLE, "".join(map(chr, range(32, 127)))])


@hypothesis.given(
    text=st.text(st.sampled_from(sorted(set(SAMPLE))) | st.sampled_from(" \n"), max_size=80),
    size=st.integers(1, 20),
)
def test_the_tokens_of_the_pieces_are_those_of_the_text(
    tokenizer: Tokenizer, text: str, size: int
) -> None:
    cut = [token for piece in split_into_chunks(text, size) for token in tokenizer.encode(piece)]
    assert cut == list(tokenizer.encode(text))


def test_pieces_are_used_where_they_are_safe(tokenizer: Tokenizer) -> None:
    assert can_be_chunked(Backend.from_str(tokenizer.to_json()))


@pytest.mark.parametrize(
    ("splitter", "normalizer"),
    [
        (None, None),
        (pre_tokenizers.Metaspace(), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), None),
        (pre_tokenizers.WhitespaceSplit(), normalizers.Prepend("_")),
        (pre_tokenizers.WhitespaceSplit(), normalizers.Replace(" ", "_")),
        (
            pre_tokenizers.WhitespaceSplit(),
            normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()]),
        ),
    ],
    ids=["merges", "metaspace", "prefix", "no pattern", "prepend", "replace", "sequence"],
)
def test_pieces_are_not_used_where_they_may_show(
    splitter: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None
) -> None:
    backend = Backend(models.BPE({"a": 0, " ": 1, "a ": 2}, [("a", " ")]))
    if splitter:
        backend.pre_tokenizer = splitter
    if normalizer:
        backend.normalizer = normalizer
    assert not can_be_chunked(backend)
