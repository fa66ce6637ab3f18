"""Tokens around a text and tokens that end one, as the files of models have them."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from train.data.chat_template import end_tokens
from train.data.token_file import DocumentFrame
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_settings import settings_files
from train.errors import UserError

FIXTURES = Path(__file__).parent / "tokenizer_folders.jsonl"
TEXTS, *FOLDERS = map(json.loads, FIXTURES.read_text(encoding="utf-8").splitlines())

PUBLISHED = ("<|endoftext|>", "</s>", "<s>", "[CLS]", "[SEP]", "<|im_end|>", "<｜end｜>")
WORDS = (*PUBLISHED, "a", "b", "<x>")
END_OF_TEXT, END, START, CLS, SEP, TURN_END, NAMED, A, B, X = range(len(WORDS))
EOS = {"eos_token": "</s>"}
CHATML = "{% for m in messages %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"


def write_folder(folder: Path, **files: Any) -> Path:
    """Write files: a text, bytes, or an object as JSON."""
    for name, content in files.items():
        if not isinstance(content, str | bytes):
            content = json.dumps(content)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def tokenizer_json(template: str = "", special: tuple[str, ...] = PUBLISHED) -> str:
    """Return a tokenizer of `WORDS` that puts the tokens of a template around a text."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    if template:
        around = [(each, WORDS.index(each)) for each in template.split() if each != "$A"]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=around
        )
    return str(backend.to_str())


def load(folder: Path, template: str = "", **files: Any) -> Tokenizer:
    """Load `WORDS` with JSON files beside them."""
    named = {f"{name}.json": content for name, content in files.items()}
    return Tokenizer.load(
        write_folder(folder, **{"tokenizer.json": tokenizer_json(template)}, **named)
    )


@pytest.mark.parametrize("record", FOLDERS, ids=lambda record: record["name"])
def test_folders_are_read_as_transformers_reads_them(
    record: dict[str, Any], tmp_path: Path
) -> None:
    files = {
        name: base64.b64decode(each["base64"]) if "base64" in each else each
        for name, each in record["files"].items()
    }
    tokenizer = Tokenizer.load(write_folder(tmp_path, **files))
    before, after = tokenizer.added_token_ids
    ids = [np.concatenate([before, tokenizer.encode(text), after]).tolist() for text in TEXTS]
    assert ids == record["ids"]
    assert [tokenizer.decode(each) for each in ids] == record["decoded"]
    assert {*record["special"]} <= tokenizer.special_token_ids
    assert record["end"] in (tokenizer.eos_token_id, None)
    assert tokenizer.num_tokens == record["tokens"]


@pytest.mark.parametrize(
    ("files", "separator", "ends"),
    [
        ({}, END_OF_TEXT, (END_OF_TEXT,)),
        ({"tokenizer_config": {"eos_token": "<｜end｜>"}}, NAMED, (NAMED,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, END, (END,)),
        ({"config": {"eos_token_id": END}}, END, (END,)),
        ({"config": {"eos_token_id": [END, TURN_END]}}, END, (END, TURN_END)),
        (  # that of generation goes first
            {"generation_config": {"eos_token_id": [X, END]}, "config": {"eos_token_id": A}},
            X,
            (X, END),
        ),
        (  # the separator is that of the tokenizer
            {"generation_config": {"eos_token_id": [TURN_END, END]}, "tokenizer_config": EOS},
            END,
            (TURN_END, END),
        ),
        (
            {
                "generation_config": {"eos_token_id": END},
                "tokenizer_config": EOS | {"chat_template": CHATML},
            },
            END,
            (END, TURN_END),
        ),
        # Ids that no token has, and what is no id: defaults of a config class.
        ({"config": {"eos_token_id": 50256}}, END_OF_TEXT, (END_OF_TEXT,)),
        ({"config": {"eos_token_id": [True, "1", None, [2]]}}, END_OF_TEXT, (END_OF_TEXT,)),
    ],
    ids=range(10),
)
def test_files_decide_what_ends_a_text(
    files: dict[str, Any], separator: int, ends: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, **files)
    assert (tokenizer.eos_token_id, end_tokens(tokenizer)) == (separator, ends)
    # And with them alone in a run's folder.
    run = tmp_path / "run"
    run.mkdir()
    tokenizer.save(run / "tokenizer.json")
    write_folder(run, **settings_files(tokenizer.settings, end_tokens(tokenizer)))
    again = Tokenizer.load(run)
    assert (again.eos_token_id, end_tokens(again)) == (separator, ends)
    assert again.digest == tokenizer.digest


def test_documents_are_between_the_tokens_of_the_template(tmp_path: Path) -> None:
    """As ModernBERT's: the vocabulary has <|endoftext|> too."""
    tokenizer = load(tmp_path, "[CLS] $A [SEP]")
    frame = DocumentFrame.of(tokenizer)
    assert frame.piece(np.array([A, B])).tolist() == [CLS, A, B, SEP]
    assert tokenizer.end_token_ids == (SEP,)
    assert [each.tolist() for each in tokenizer.text_frame] == [[CLS], [SEP]]


def test_texts_without_a_first_token_begin_with_the_separator(tmp_path: Path) -> None:
    """As T5's: documents of training windows have a separator before them."""
    tokenizer = load(tmp_path, "$A [SEP]")
    assert DocumentFrame.of(tokenizer).piece(np.array([A, B])).tolist() == [SEP, A, B]
    assert [each.tolist() for each in tokenizer.text_frame] == [[SEP], [SEP]]


def test_decoder_start_of_the_files(tmp_path: Path) -> None:
    assert load(tmp_path).decoder_start_token_id == END_OF_TEXT
    config = {"model_type": "bart", "decoder_start_token_id": B}
    tokenizer = load(tmp_path, config=config)
    assert tokenizer.decoder_start_token_id == B
    run = tmp_path / "run"
    run.mkdir()
    tokenizer.save(run / "tokenizer.json")
    write_folder(run, **settings_files(tokenizer.settings, ()))
    assert Tokenizer.load(run).decoder_start_token_id == B
    config = {"model_type": "t5", "pad_token_id": CLS}
    assert load(tmp_path, config=config).decoder_start_token_id == CLS
    # That of the type, which a config.json may leave out.
    assert load(tmp_path, config={"model_type": "pegasus"}).decoder_start_token_id == 0
    assert load(tmp_path, config={"model_type": "m2m_100"}).decoder_start_token_id == 2


def test_forced_token_of_the_files(tmp_path: Path) -> None:
    config = {"model_type": "mbart", "forced_bos_token_id": B}
    tokenizer = load(tmp_path, config=config)
    assert tokenizer.forced_bos_token_id == B
    run = tmp_path / "run"
    run.mkdir()
    tokenizer.save(run / "tokenizer.json")
    write_folder(run, **settings_files(tokenizer.settings, ()))
    assert Tokenizer.load(run).forced_bos_token_id == B
    generation = {"forced_bos_token_id": None}
    found = load(tmp_path, config=config, generation_config=generation)
    assert found.forced_bos_token_id is None


def test_tokens_without_a_row_are_refused_in_texts(tmp_path: Path) -> None:
    backend = Backend.from_str(tokenizer_json())
    backend.add_tokens(["<image>"])
    tokenizer = Tokenizer(backend, "mine").with_num_embeddings(len(WORDS))
    assert (tokenizer.vocab_size, tokenizer.num_tokens) == (10, 11)
    assert "<image>" not in tokenizer.vocabulary
    assert tokenizer.encode("a b").tolist() == [A, B]
    for encode in (tokenizer.encode, tokenizer.encode_with_special_tokens):
        with pytest.raises(UserError, match="has <image>, a token beyond the model's 10"):
            encode("a <image>")
    tokenizer.save(tmp_path / "tokenizer.json")
    write_folder(tmp_path, **settings_files(tokenizer.settings, ()))
    assert Tokenizer.load(tmp_path).vocab_size == 10
    with pytest.raises(UserError, match="10 tokens and the model 9"):
        Tokenizer(Backend.from_str(tokenizer_json()), "mine").with_num_embeddings(9)


@pytest.mark.parametrize(
    ("place", "component"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP///38="}),
        (
            "pre_tokenizer",
            {
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            },
        ),
    ],
)
def test_panics_of_the_library_are_one_line(
    place: str, component: dict[str, Any], tmp_path: Path
) -> None:
    content = json.loads(tokenizer_json()) | {place: component}
    write_folder(tmp_path, **{"tokenizer.json": content})
    with pytest.raises(UserError, match=r"damaged, or no tokenizer \(.*\); fetch it again$"):
        Tokenizer.load(tmp_path).encode("a" * 40 + "b")
