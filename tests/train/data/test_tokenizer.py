import pathlib
import random

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from train.data import tokenizer as tokenizer_module
from train.data.data_config import TokenizerConfig, TokenizerKind
from train.data.tokenizer import (
    StreamDecoder,
    Tokenizer,
    split_into_chunks,
)
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError

TEXTS = ["The cat sat on the mat.\nThe mat sat.\n", "naïve Straße 日本語 🎉 don't\t\r\n"]


EXACT: tuple[TokenizerKind, ...] = ("byte", "bpe")
KINDS: tuple[TokenizerKind, ...] = (*EXACT, "character", "word", "wordpiece")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(TokenizerConfig(kind, vocab_size=300), TEXTS) for kind in KINDS}


@pytest.mark.parametrize("kind", EXACT)
@hypothesis.given(text=st.text(max_size=60))
@hypothesis.example("<|endoftext|> is text here\x00\ufeff\u2028\x1c  \r\n")
def test_byte_kinds_round_trip_any_text(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokens = tokenizers[kind].encode(text)
    assert tokens.dtype == np.int32
    assert tokenizers[kind].eos_token_id not in tokens
    assert tokenizers[kind].decode(tokens) == text


@hypothesis.given(text=st.text(st.sampled_from("".join(TEXTS)), max_size=60))
def test_characters_round_trip(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokens = tokenizers["character"].encode(text)
    assert len(tokens) == len(text)
    assert tokenizers["character"].decode(tokens) == text


def test_error_names_unknown_characters(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(UserError, match=r"lacks \('X' 'é'\)"):
        tokenizers["character"].encode("The éX cat")


def test_invalid_unicode_is_an_error(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(UserError, match="surrogates not allowed at character 2"):
        tokenizers["byte"].encode("ab\ud800")


@pytest.mark.parametrize("kind", KINDS)
def test_batch_encoding_equals_single_encoding(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    texts = [TEXTS[0] * 4001, "", *TEXTS, TEXTS[1] * 3001]  # some are longer than a piece
    tokenizer = tokenizers[kind]
    for text, tokens in zip(texts, tokenizer.encode_documents(iter(texts)), strict=True):
        full = tokenizer._backend.encode(text, add_special_tokens=False).ids
        assert tokens.tolist() == full


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(tokenizers: dict[str, Tokenizer], kind: str, tmp_path: pathlib.Path) -> None:
    tokenizers[kind].save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.digest == tokenizers[kind].digest
        assert loaded.vocab_size == tokenizers[kind].vocab_size
        assert loaded.eos_token_id == tokenizers[kind].eos_token_id
        for text in TEXTS:
            assert loaded.encode(text).tolist() == tokenizers[kind].encode(text).tolist()
    assert len({tokenizer.digest for tokenizer in tokenizers.values()}) == len(KINDS)


def test_separator_is_not_decoded(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte", "bpe", "character", "wordpiece"):
        tokenizer = tokenizers[kind]
        tokens = [tokenizer.eos_token_id, *tokenizer.encode("cat"), tokenizer.eos_token_id]
        assert tokenizer.decode(np.array(tokens)) == "cat"


def test_tokenizer_without_separator_is_an_error() -> None:
    with pytest.raises(UserError, match=r"mine: has no token that separates .* <\|endoftext\|>"):
        Tokenizer(Backend(models.BPE({"a": 0}, [])), "mine")


def test_bert_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    bert = tokenizers["wordpiece"]  # [PAD] [UNK] [CLS] [SEP] [MASK]
    assert (bert.cls_token_id, bert.eos_token_id, bert.mask_token_id) == (2, 3, 4)
    assert bert.special_token_ids == {0, 1, 2, 3, 4}
    assert bert.with_mask_token() is bert


@pytest.mark.parametrize("kind", ["byte", "bpe", "character", "word"])
def test_mask_token_gets_a_new_id(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    plain = tokenizers[kind]
    assert (plain.cls_token_id, plain.mask_token_id) == (plain.eos_token_id, None)
    masked = plain.with_mask_token()
    assert masked.mask_token_id == plain.vocab_size == masked.vocab_size - 1
    assert masked.special_token_ids == {*plain.special_token_ids, masked.mask_token_id}
    assert masked.digest != plain.digest
    text = "The mat[MASK] sat" if kind in ("byte", "bpe") else "The mat sat"
    assert masked.encode(text).tolist() == plain.encode(text).tolist()
    assert plain.mask_token_id is None
    again = Tokenizer(Backend.from_str(masked.to_json()))
    assert again.mask_token_id == masked.mask_token_id
    assert (again.special_token_ids, again.digest) == (masked.special_token_ids, masked.digest)


def test_gaps_in_token_ids_count_in_the_vocabulary_size() -> None:
    backend = Backend(models.WordLevel({"<eos>": 0, "a": 10}, unk_token="a"))
    assert Tokenizer(backend).vocab_size == 11


def streamed(tokenizer: Tokenizer, tokens: list[int], count: int = 1) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    parts = [tokens[i : i + count] for i in range(0, len(tokens), count)]
    return [*map(decoder.push, parts), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_arbitrary_tokens_can_be_streamed(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, draw = tokenizers[kind], random.Random(11)
    for _ in range(200):
        tokens = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(20))]
        for count in (1, 3, 20):
            assert "".join(streamed(tokenizer, tokens, count)) == tokenizer.decode(tokens)


def test_characters_are_streamed_when_complete(tokenizers: dict[str, Tokenizer]) -> None:
    tokens = list("aé🎉b".encode())
    parts = streamed(tokenizers["byte"], tokens)
    assert parts == ["a", "", "é", "", "", "", "🎉", "b", ""]
    assert streamed(tokenizers["byte"], [*tokens[:5], 32]) == [*parts[:5], "\ufffd ", ""]
    assert streamed(tokenizers["byte"], tokens[:5]) == [*parts[:5], "\ufffd"]


def test_byte_tokens_are_held_back_until_complete() -> None:
    vocabulary = {"<eos>": 0, "a": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a€").tolist() == [1, 2, 3, 4]
    assert streamed(tokenizer, [1, 2, 3, 4, 1]) == ["a", "", "", "€", "a", ""]
    assert streamed(tokenizer, [2, 3, 1]) == ["", "", "\ufffd\ufffda", ""]


def test_streaming_cost_is_constant_per_token(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    decode = Tokenizer.decode

    def counted(tokenizer: Tokenizer, tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode(tokenizer, tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    streamed(tokenizers["word"], tokenizers["word"].encode("the cat sat\n" * 50).tolist())
    assert max(decoded) <= 2


SAMPLE = (
    "It's  the cat's\n\n\tmat, isn't it?  Über-naïve 12 345 ... 日本 語  \n def f(x):\n    return\n"
)


def test_chunks_end_before_a_space() -> None:
    chunks = list(split_into_chunks(["one  two", "\nthr", "", "ee four"], size=4))
    assert chunks == ["one  two", "\nthree", " four"]
    assert list(split_into_chunks([], size=4)) == [""]
    assert list(split_into_chunks(["uncut", "table"], size=1)) == ["uncuttable"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    config = TokenizerConfig(request.param, vocab_size=300)
    return train_tokenizer(config, [SAMPLE, "".join(map(chr, range(32, 127)))])


@hypothesis.given(
    text=st.text(st.sampled_from(sorted(set(SAMPLE))) | st.sampled_from(" \n"), max_size=80),
    size=st.integers(1, 20),
)
def test_tokens_of_chunks_equal_those_of_the_text(
    tokenizer: Tokenizer, text: str, size: int
) -> None:
    assert_chunks_have_the_tokens_of_the_text(tokenizer, text, size)


def assert_chunks_have_the_tokens_of_the_text(tokenizer: Tokenizer, text: str, size: int) -> None:
    """Compare chunks, the cuts of which are chosen by few characters around them."""
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_CONTEXT", 8)
        chunks = list(
            split_into_chunks(pieces, tokenizer_module._CANDIDATE, tokenizer._is_cut, size)
        )
    assert "".join(chunks) == text
    cut = [token for piece in chunks for token in tokenizer.encode(piece)]
    assert cut == list(tokenizer.encode(text))


def test_chunks_are_used_where_safe(tokenizer: Tokenizer) -> None:
    assert all(tokenizer._is_cut(f"a{end}", f"{start}b") for end in ("", ".") for start in " \n")


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
PATTERNS = {
    "qwen": [rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{PUNCTUATION}|{SPACES}"],
    "gpt4o": [
        "|".join(
            [
                rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?",
                rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
            ]
        )
    ],
    "deepseek": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK],
}
"""Patterns that split texts for published tokenizers."""


@pytest.fixture(scope="module", params=[*PATTERNS, "smollm"])
def published(request: pytest.FixtureRequest) -> Tokenizer:
    """A byte-level tokenizer whose merges go across every boundary that a pattern leaves."""
    backend = Backend(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS.get(request.param, [])
    ]
    steps = steps or [pre_tokenizers.Digits(individual_digits=True)]
    # Trained on whole lines: most merges are possible only if a word were not ended.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE, CHUNKED_SAMPLE] * 3, trainer)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=request.param == "smollm")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    if request.param == "qwen":
        backend.normalizer = normalizers.NFC()
    return Tokenizer(backend)


CHUNKED_SAMPLE = """日本、語。「あ！」

はい？ がA。\r
12、3。a\u0301 e\u0301\u3099'S 'Re it's/
/\t ×÷ ー・ǅ한국
"""


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    text=st.text(
        st.sampled_from(sorted({*SAMPLE, *CHUNKED_SAMPLE}))
        | st.sampled_from(" \n'a1.、")
        | st.characters(exclude_categories=["Cs"]),
        max_size=60,
    ),
    size=st.integers(1, 12),
)
def test_tokens_of_chunks_under_published_patterns(
    published: Tokenizer, text: str, size: int
) -> None:
    assert_chunks_have_the_tokens_of_the_text(published, text, size)


def test_chinese_is_cut_at_its_punctuation(published: Tokenizer) -> None:
    cuts = ("日本語", "。はい"), ("。はい", "？\nＡ"), ("Ａ", " a")
    assert all(published._is_cut(*each) for each in cuts)


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
            normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKC()]),
        ),
        (pre_tokenizers.Split(Regex(r"\S+ ?|\s+"), "isolated"), None),
        (pre_tokenizers.Split(Regex(PATTERNS["qwen"][0]), "removed"), None),
        (pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}"), "isolated"), None),
    ],
    ids=range(10),
)
@hypothesis.given(text=st.text(st.sampled_from("a_ \n1é"), max_size=60), size=st.integers(1, 9))
def test_chunks_keep_tokens_whatever_splits_the_words(
    splitter: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None,
    text: str,
    size: int,
) -> None:
    names = ["a", " ", "_", "▁", "Ġ", "Ċ", "1", "é", "\n", "a ", "a▁", "a_", "aĠ", "<eos>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("a", each) for each in (" ", "▁", "_", "Ġ")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<eos>"))
    if splitter:
        backend.pre_tokenizer = splitter
    if normalizer:
        backend.normalizer = normalizer
    assert_chunks_have_the_tokens_of_the_text(Tokenizer(backend), text, size)


@pytest.mark.parametrize(
    ("content", "rstrip"), [("is it", False), ("<a>", True)], ids=["space inside", "space after"]
)
def test_chunks_do_not_cut_added_tokens(content: str, rstrip: bool) -> None:
    backend = Backend(models.BPE({"<eos>": 0}, [], unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_tokens(["  ", "<b>", AddedToken(content, rstrip=rstrip)])
    tokenizer = Tokenizer(backend)
    assert tokenizer._is_cut("it <b>", " so")
    before, after = {"is it": ("is", " it"), "<a>": ("<a>", " b")}[content]
    assert not tokenizer._is_cut(before, after)
