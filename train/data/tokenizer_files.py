"""Files beside a tokenizer, as others write them: vocabularies and chat templates.

Vocabularies: tokenizer.json, GPT-2's two files, BERT's vocab.txt and SentencePiece's models. Chat
templates: chat_template.jinja and tokenizer_config.json.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from train.data.bounded_files import MAX_SETTINGS_BYTES, MAX_VOCABULARY_BYTES, read_bytes
from train.data.files import AnyPath, expand_path
from train.errors import UserError, as_user_error

if TYPE_CHECKING:
    import tokenizers

BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


SENTENCEPIECE_FILES = ("*.model", "*.spm")
"""Names of SentencePiece models."""

SHIFTED_MODEL = "sentencepiece.bpe.model"
"""Name of models whose ids are not those of the tokenizer (XLM-R, CamemBERT)."""


GPT2_END_OF_TEXT = "<|endoftext|>"


def load_backend_tokenizer(path: str) -> tokenizers.Tokenizer:
    """Load a tokenizer from a file, or from a folder that holds one.

    Raises:
      UserError: There is none, or it is damaged.
    """
    location = expand_path(path)
    with as_user_error(path):
        if location.is_dir():
            return _from_folder(location)
        if not location.exists():
            raise UserError(
                f"{path}: does not exist; give a tokenizer.json, a vocab.txt or a folder"
            )
        if location.name == "vocab.txt":
            return _bert(location)
        if any(location.match(pattern) for pattern in SENTENCEPIECE_FILES):
            return _sentencepiece(location)
        return _tokenizer_json(location)


def _from_folder(folder: AnyPath) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").exists():
        return _tokenizer_json(folder / "tokenizer.json")
    if (folder / "merges.txt").exists():
        for name in ("encoder.json", "vocab.json"):
            if (folder / name).exists():
                return _gpt2(folder / name, folder / "merges.txt")
    if (folder / "vocab.txt").exists():
        return _bert(folder / "vocab.txt")
    for pattern in SENTENCEPIECE_FILES:
        for file in sorted(folder.glob(pattern)):
            return _sentencepiece(file)
    raise UserError(
        f"{folder}: has no tokenizer; it needs tokenizer.json, vocab.txt, tokenizer.model, or "
        "encoder.json (or vocab.json) and merges.txt"
    )


def _sentencepiece(file: AnyPath) -> tokenizers.Tokenizer:
    """Load a SentencePiece model, with the tokens that the files beside it add."""
    from train.data.sentencepiece_model import make_backend, parse_model

    if file.match("*.spm"):  # Marian
        raise UserError(
            f"{file}: is a SentencePiece model of one side of a translation; give a tokenizer.json "
            "that encodes both sides with the ids of vocab.json"
        )
    if file.name == SHIFTED_MODEL:
        raise UserError(
            f"{file}: has other ids than the tokenizer; where transformers and sentencepiece are "
            "installed, AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER) writes "
            "tokenizer.json"
        )
    try:
        model = parse_model(read_bytes(file, MAX_VOCABULARY_BYTES))
    except ValueError as error:
        raise UserError(f"{file}: {error}; fetch it again, or give a tokenizer.json") from error
    added = load_added_tokens(file.parent, len(model.pieces))
    with _damaged(file):
        backend = make_backend(model.with_control({each.text for each in added if each.special}))
    _add_tokens(backend, added, file)
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, added: list[AddedToken], file: AnyPath) -> None:
    """Add tokens in the order of their ids.

    Raises:
      UserError: A token cannot have its id: the files do not belong together.
    """
    import tokenizers

    # The library numbers new tokens itself, from the size of the vocabulary on: each gets its own
    # id only if they are added in the order of their ids.
    for token_id, text, special, normalized in sorted(added):
        known = backend.token_to_id(text)
        if known is None and token_id == backend.get_vocab_size():
            token = tokenizers.AddedToken(text, special=special, normalized=normalized)
            (backend.add_special_tokens if special else backend.add_tokens)([token])
        elif known != token_id:
            raise UserError(
                f"{file.parent}: its settings give token {text} the id {token_id}, and "
                f"{file.name} does not; fetch the files that belong together"
            )


def _tokenizer_json(file: AnyPath) -> tokenizers.Tokenizer:
    import tokenizers

    text = _text(file)
    with _damaged(file):
        return tokenizers.Tokenizer.from_str(text)


def _gpt2(vocabulary_file: AnyPath, merges_file: AnyPath) -> tokenizers.Tokenizer:
    """Load byte-level BPE (Radford et al. 2019, section 2.2) from a vocabulary and its merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        vocabulary = json.loads(_text(vocabulary_file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{vocabulary_file}: not JSON ({error}); fetch it again") from error
    lines = _text(merges_file).splitlines()
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    with _damaged(merges_file):
        merges = [(left, right) for left, right in pairs]
        backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if GPT2_END_OF_TEXT in vocabulary:
        backend.add_special_tokens([GPT2_END_OF_TEXT])
    return backend


def _bert(file: AnyPath) -> tokenizers.Tokenizer:
    """Load WordPiece (Devlin et al. 2019), cased if any word of the vocabulary is."""
    words = _text(file).rstrip("\n").split("\n")
    # vocab.txt does not say whether the model is cased. "[CLS]" and the like are upper-case in all.
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    if "[UNK]" not in words:
        raise UserError(
            f"{file}: has no [UNK], which every vocabulary of BERT has; give a tokenizer.json "
            "instead"
        )
    from tokenizers import processors

    vocabulary = {word: n for n, word in enumerate(words)}
    with _damaged(file):
        backend = make_wordpiece_backend(vocabulary, lowercase=not cased)
        if {"[CLS]", "[SEP]"} <= vocabulary.keys():
            ends = [(name, vocabulary[name]) for name in ("[SEP]", "[CLS]")]
            backend.post_processor = processors.BertProcessing(*ends)
        return backend


def make_wordpiece_backend(vocabulary: dict[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer of these words, with BERT's normalizer and decoder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([name for name in BERT_SPECIAL_TOKENS if name in vocabulary])
    return backend


def _text(file: AnyPath) -> str:
    try:
        return read_bytes(file, MAX_VOCABULARY_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; fetch it again") from error


@contextlib.contextmanager
def _damaged(file: AnyPath) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # the tokenizers library raises no narrower class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{file}: damaged, or no tokenizer ({error}); fetch it again") from error


TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"


class ChatFiles(NamedTuple):
    """Settings of conversations in the files beside a tokenizer."""

    template: str = ""
    """Jinja source; empty if there is none."""
    special_tokens: dict[str, str] = {}  # noqa: RUF012
    """Special tokens by name: `eos_token`."""


def load_chat_files(path: str) -> ChatFiles:
    """Read the files in a tokenizer's folder, or beside a tokenizer's file.

    Raises:
      UserError: One is damaged.
    """
    folder = expand_path(path)
    with as_user_error(path):
        if not folder.is_dir():
            folder = folder.parent
        config = _read_object(folder / CONFIG_FILE)
        tokens = _read_object(folder / TOKENS_FILE) | config
        template = config.get("chat_template", "")
        if (folder / TEMPLATE_FILE).exists():
            template = _read(folder / TEMPLATE_FILE)
    if isinstance(template, list):  # several, by name
        named = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
        template = named.get("default")
    names = {name: _content(value) for name, value in tokens.items() if name.endswith("_token")}
    special = {name: text for name, text in names.items() if text}
    return ChatFiles(template if isinstance(template, str) else "", special)


class AddedToken(NamedTuple):
    """A token beyond those of a tokenizer's model, or one of them that is special."""

    id: int
    text: str
    special: bool = False
    normalized: bool = False
    """Looked for in the normalized text."""


def load_added_tokens(folder: AnyPath, num_pieces: int) -> list[AddedToken]:
    """Read the tokens that the settings in a folder add to a SentencePiece model, given its size.

    Raises:
      UserError: A file is damaged.
    """
    config = _read_object(folder / CONFIG_FILE)
    names = _read_object(folder / TOKENS_FILE) | config
    special = {_content(value) for name, value in names.items() if name.endswith("_token")}
    special |= {_content(each) for each in names.get("additional_special_tokens") or []}
    found: dict[int, AddedToken] = {}
    try:
        for text, number in _read_object(folder / ADDED_FILE).items():
            found[int(number)] = AddedToken(int(number), text, text in special)
        for key, value in (config.get("added_tokens_decoder") or {}).items():
            text, is_special = str(value["content"]), bool(value.get("special"))
            found[int(key)] = AddedToken(
                int(key), text, is_special, bool(value.get("normalized")) and not is_special
            )
        if not found:  # T5's sentinels are counted, and their numbers descend
            sentinels = range(int(config.get("extra_ids", 0)) - 1, -1, -1)
            for number, sentinel in enumerate(sentinels, start=num_pieces):
                found[number] = AddedToken(number, f"<extra_id_{sentinel}>", special=True)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: its added tokens are malformed ({error}); fetch {CONFIG_FILE} and "
            f"{ADDED_FILE} again"
        ) from error
    return list(found.values())


def chat_files(template: str, special_tokens: dict[str, str]) -> dict[str, str]:
    """Return the files to write beside a tokenizer, by name."""
    files = {TEMPLATE_FILE: template} if template else {}
    if special_tokens:
        files[CONFIG_FILE] = json.dumps(special_tokens, indent=2, ensure_ascii=False) + "\n"
    return files


def _content(value: Any) -> str:
    """Return a token of tokenizer_config.json: its text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_object(file: AnyPath) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); fetch it again") from error
    return content if isinstance(content, dict) else {}


def _read(file: AnyPath) -> str:
    try:
        return read_bytes(file, MAX_SETTINGS_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; fetch it again") from error
