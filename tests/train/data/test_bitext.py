import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from train.data.bitext import (
    BitextDataConfig,
    BitextSplit,
    decode_sentence,
    encode_sentences,
    prepare_bitext,
    read_sentence_pairs,
    source_frame,
    target_frame,
)
from train.data.data_config import TokenizerConfig
from train.data.examples import ExampleCorpus
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_settings import TokenizerSettings
from train.errors import UserError

ENGLISH = ["A dog .", "two dogs run", "a man runs", "two men"]
GERMAN = ["ein Hund .", "zwei Hunde laufen", "Ein Mann läuft", "zwei Männer"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write two training files, and gzip validation files."""
    (tmp_path / "train.en").write_text("\n".join(ENGLISH) + "\n")
    (tmp_path / "train.de").write_text("\n".join(GERMAN) + "\n")
    (tmp_path / "val.en.gz").write_bytes(gzip.compress(b"a man .\na\n"))
    (tmp_path / "val.de.gz").write_bytes(gzip.compress(b"ein Mann .\nein Mann ein Hund\n"))
    return tmp_path


def prepared(folder: Path, **settings: Any) -> ExampleCorpus[BitextSplit]:
    defaults: dict[str, Any] = {
        "path": f"{folder}/train",
        "validation_path": f"{folder}/val",
        "max_length": 8,
        "tokenizer": TokenizerConfig("word", lowercase=True),
    }
    return prepare_bitext(BitextDataConfig(**defaults | settings))


def test_batch_matches_hand_computed_values(files: Path) -> None:
    corpus = prepared(files)
    end = corpus.tokenizer.eos_token_id
    batch = corpus.split("train").batch(np.array([2, -1, 0]), (4, 5))
    men, dogs, mann, hund = (
        corpus.tokenizer.encode(text).tolist()
        for text in ("a man runs", "a dog .", "ein mann läuft", "ein hund .")
    )
    # Both languages share the tokenizer, which knows all of these words.
    assert corpus.tokenizer.vocabulary["<unk>"] not in [*men, *dogs, *mann, *hund]
    assert {name: array.tolist() for name, array in batch.items()} == {
        "source": [[*men, end], [0] * 4, [*dogs, end]],
        "source_segments": [[1] * 4, [0] * 4, [1] * 4],
        "tokens": [[end, *mann, 0], [0] * 5, [end, *hund, 0]],
        "targets": [[*mann, end, 0], [0] * 5, [*hund, end, 0]],
        "segments": [[1, 1, 1, 1, 0], [0] * 5, [1, 1, 1, 1, 0]],
        "weights": [[1, 1, 1, 1, 0], [0] * 5, [1, 1, 1, 1, 0]],
        "examples": [2, 0, 0],
    }
    types = {name: array.dtype.name for name, array in batch.items()}
    assert (types.pop("weights"), types.pop("examples")) == ("float32", "uint32")
    assert set(types.values()) == {"int32"}


@pytest.mark.parametrize("kind", ["bpe", "character", "wordpiece"])
def test_sentences_round_trip(files: Path, kind: Any) -> None:
    tokenizer = prepared(
        files, max_length=99, tokenizer=TokenizerConfig(kind, vocab_size=400)
    ).tokenizer
    texts = GERMAN[1:]  # wordpiece does not encode the space before a full stop
    for tokens, text in zip(encode_sentences(tokenizer, texts), texts, strict=True):
        assert tokens[-1] == tokenizer.eos_token_id
        babble = tokenizer.encode("man")
        assert decode_sentence(tokenizer, np.concatenate([tokens, babble])) == text
        assert decode_sentence(tokenizer, tokens[:-1]) == text
    # A word has the same tokens at every position.
    first, later = encode_sentences(tokenizer, ["zwei Hunde", "laufen zwei Hunde"])
    assert first.tolist() == later[-len(first) :].tolist()


def test_training_drops_long_and_empty_pairs(files: Path) -> None:
    (files / "train.en").write_text("\n".join([*ENGLISH, "", "a " * 8, "a"]) + "\n")
    (files / "train.de").write_text("\n".join([*GERMAN, "ein", "ein", "ein " * 8]) + "\n")
    corpus = prepared(files)
    assert [pair.source for pair in corpus.split("train").pairs] == ENGLISH
    assert len(corpus.split("train").source) == 4
    assert [note[:31] for note in corpus.notes] == ["the train split: 3 of 7 pairs a"]
    assert prepared(files, max_length=9).notes[0].startswith("the train split: 1 of 7 pairs")


def test_training_keeps_sentences_of_one_token(tmp_path: Path) -> None:
    pairs = [("yes", "ja"), ("no", "nein"), (" ", "leer"), ("the house", "das haus")] * 5
    for side, ending in enumerate(("en", "de")):
        lines = "".join(pair[side] + "\n" for pair in pairs)
        for split in ("train", "val"):
            (tmp_path / f"{split}.{ending}").write_text(lines)
    corpus = prepared(tmp_path, tokenizer=TokenizerConfig("bpe", vocab_size=400))
    kept = {pair.source for pair in corpus.split("train").pairs}
    assert kept == {"yes", "no", "the house"}
    [tokens] = encode_sentences(corpus.tokenizer, ["yes"])
    assert len(tokens) == 2  # a word and the end, as of an empty text: a space and the end


def test_evaluation_truncates_long_pairs(files: Path) -> None:
    corpus = prepared(files, max_length=4)
    split, end = corpus.split("validation"), corpus.tokenizer.eos_token_id
    assert len(split.pairs) == len(split.source) == 2
    ein, mann = corpus.tokenizer.encode("ein mann")
    assert split.target[1].tolist() == [ein, mann, ein, end]
    assert [note[:29] for note in corpus.notes] == ["the validation split: 1 of 2 "]


def test_digest_depends_on_the_pairs(files: Path) -> None:
    digest = prepared(files).digest
    assert prepared(files).digest == digest
    (files / "train.de").write_text("\n".join(reversed(GERMAN)) + "\n")
    assert prepared(files).digest != digest


@pytest.mark.parametrize("name", ["val", "validation"])
def test_folder_of_two_files_a_split(files: Path, name: str) -> None:
    for language in ("en", "de"):
        (files / f"val.{language}.gz").rename(files / f"{name}.{language}.gz")
    splits = read_sentence_pairs(BitextDataConfig(path=str(files)))
    assert splits["train"] == list(zip(ENGLISH, GERMAN, strict=True))
    assert splits["validation"] == [("a man .", "ein Mann ."), ("a", "ein Mann ein Hund")]


PAIRS = [("a dog", "ein Hund"), ("two, men", "zwei Männer"), ('He said "go"', "Geh!")]
QUOTED = [[text.replace('"', '""') for text in pair] for pair in PAIRS]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("p.tsv", [*map("\t".join, PAIRS)]),
        ("p.txt", ["en\tde", *map("\t".join, PAIRS)]),
        ("p.tsv", ["de\tid\ten", *(f"{de}\t1\t{en}" for en, de in PAIRS)]),
        ("p.csv", ["source,target", *('"{}","{}"'.format(*pair) for pair in QUOTED)]),
        ("p.json", [json.dumps({"en": en, "de": de}) for en, de in PAIRS]),
        ("p", [json.dumps({"translation": {"de": de, "en": en}}) for en, de in PAIRS]),
    ],
    ids=["two columns", "names", "names of others", "CSV", "JSON", "translation"],
)
def test_pairs_of_one_file(tmp_path: Path, name: str, lines: list[str]) -> None:
    (tmp_path / name).write_text("\n".join(lines))
    splits = read_sentence_pairs(BitextDataConfig(path=str(tmp_path / name)))
    assert sorted([*splits["train"], *splits["validation"]]) == sorted(PAIRS)


def test_columns_beyond_two_are_noted_and_null_sides_left_out(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text("a\tb\tc\nd\te\tf\n")
    splits = read_sentence_pairs(BitextDataConfig(path=str(tmp_path / "p.tsv")))
    assert any("has 3 columns" in note for note in splits.notes)
    rows = [{"en": "a", "de": None}, {"en": "b", "de": "c"}, {"en": "d", "de": "e"}]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    splits = read_sentence_pairs(BitextDataConfig(path=str(tmp_path / "p.json")))
    assert sorted([*splits["train"], *splits["validation"]]) == [("b", "c"), ("d", "e")]


def test_commas_of_plain_text_separate_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("So, two men.\nOh, a dog.\n")
    with pytest.raises(UserError, match=r"p\.txt:1: has no sentences in .*it has one text"):
        read_sentence_pairs(BitextDataConfig(path=str(tmp_path / "p.txt")))


def test_files_that_are_no_pairs_are_errors(files: Path) -> None:
    with pytest.raises(UserError, match=r"data\.test_path .*test: does not exist"):
        prepared(files, test_path=f"{files}/test")
    with pytest.raises(UserError, match=r"train: names one of two files, \.en and \.fr"):
        prepared(files, target_lang="fr")
    with pytest.raises(UserError, match="names one of two files"):
        prepared(files, path=f"{files}/train.en")
    with pytest.raises(UserError, match="the train split: all its pairs are longer"):
        prepared(files, max_length=2)
    (files / "train.de").write_text("\n".join(GERMAN[:3]) + "\n")
    with pytest.raises(UserError, match=r"train\.de: has 3 lines, but .*train\.en has 4"):
        prepared(files)


def language_tokenizer(template: str, names: tuple[str, str], **settings: Any) -> Tokenizer:
    words = ["<s>", "<pad>", "</s>", "dog", "hund", *names]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "dog"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", *names])
    around = [(each, words.index(each)) for each in template.split() if each != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    return Tokenizer(backend, "mine", TokenizerSettings(end_token_ids=(2,), **settings))


@pytest.mark.parametrize(
    ("template", "names", "start", "source", "target", "read", "written"),
    [
        # mBART-50, NLLB and M2M-100: the decoder starts with </s> and must write the language.
        ("en_XX $A </s>", ("en_XX", "de_DE"), 2, "", "de_DE", "en_XX dog </s>", "de_DE hund </s>"),
        (
            "__en__ $A </s>",
            ("__en__", "__de__"),
            2,
            "de",
            "en",
            "__de__ dog </s>",
            "__en__ hund </s>",
        ),
        # NLLB of older files has it after the text; a target then has it at both ends.
        (
            "$A </s> eng_Latn",
            ("eng_Latn", "deu_Latn"),
            2,
            "",
            "deu_Latn",
            "dog </s> eng_Latn",
            "deu_Latn hund </s> deu_Latn",
        ),
        # mBART-25: the decoder starts with the language.
        ("$A </s> en_XX", ("en_XX", "de_DE"), 5, "", "de_DE", "dog </s> en_XX", "hund </s> de_DE"),
    ],
)
def test_languages_have_their_tokens(
    template: str,
    names: tuple[str, str],
    start: int,
    source: str,
    target: str,
    read: str,
    written: str,
) -> None:
    tokenizer = language_tokenizer(template, names, decoder_start_token_id=start)
    assert tokenizer.eos_token_id == 2
    ids = tokenizer.vocabulary
    frame = target_frame(tokenizer, language=target)
    token = tokenizer.language_token_ids[target]
    assert (frame.start, frame.forced) == ((token, None) if start == 5 else (2, token))
    of_source = source_frame(tokenizer, source)
    for text, sides, expected in (("dog", of_source, read), ("hund", frame, written)):
        [tokens] = encode_sentences(tokenizer, [text], sides)
        assert tokens.tolist() == [ids[word] for word in expected.split()]
    with pytest.raises(UserError, match="target_language xx: is not a language"):
        target_frame(tokenizer, language="xx")


def test_language_of_the_files_begins_targets() -> None:
    """`forced_bos_token_id`, as models of one target language have it."""
    tokenizer = language_tokenizer(
        "en_XX $A </s>", ("en_XX", "de_DE"), decoder_start_token_id=2, forced_bos_token_id=6
    )
    frame = target_frame(tokenizer)
    assert (frame.start, frame.forced, frame.before.tolist()) == (2, 6, [6])
    assert source_frame(tokenizer).before.tolist() == [5]
