"""Vocabularies of others as tokenizers of the `tokenizers` library.

Read are tokenizer.json, GPT-2's two files, BERT's vocab.txt and SentencePiece's models, with the
settings beside them (`tokenizer_settings`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from train.data.sentencepiece_model import make_backend, read_model
from train.data.tokenizer_settings import (
    ROLES,
    ModelFiles,
    TokenizerSettings,
    Vocabulary,
    decode_text,
)
from train.errors import UserError, as_user_error
from train.files import MAX_VOCABULARY_BYTES, AnyPath, expand_path, read_bytes

BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


SENTENCEPIECE_FILES = ("*.model", "*.spm")
"""Names of SentencePiece models."""

SHIFTED_MODEL = "sentencepiece.bpe.model"
"""Name of models whose ids are not those of the tokenizer (XLM-R, CamemBERT)."""


GPT2_END_OF_TEXT = "<|endoftext|>"


def load_backend_tokenizer(path: str) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Load a tokenizer from a file or a folder, with the settings beside it.

    Its post-processor puts those tokens around a text that the model's files say, and the special
    tokens that they name are special.

    Raises:
      UserError: There is none, or a file is damaged.
    """
    location = expand_path(path)
    with as_user_error(path):
        if not location.exists():
            raise UserError(
                f"{path}: does not exist; give a tokenizer.json, a vocab.txt or a folder"
            )
        file = _find_vocabulary(location) if location.is_dir() else location
        vocabulary = _kind_of_vocabulary(file)
        files = ModelFiles.read(file.parent, vocabulary)
        backend = _LOADERS[vocabulary](file, files)
    with tokenizer_errors(str(file)):
        _add_special_tokens(backend, files)
        _add_post_processor(backend, files)
    return backend, files.settings(backend.get_vocab())


def _find_vocabulary(folder: AnyPath) -> AnyPath:
    """Return the file of a folder's tokenizer; of two files, the first."""
    if (folder / "tokenizer.json").exists():
        return folder / "tokenizer.json"
    if (folder / "merges.txt").exists():
        for name in ("encoder.json", "vocab.json"):
            if (folder / name).exists():
                return folder / name
    if (folder / "vocab.txt").exists():
        return folder / "vocab.txt"
    for pattern in SENTENCEPIECE_FILES:
        for file in sorted(folder.glob(pattern)):
            return file
    raise UserError(
        f"{folder}: has no tokenizer; it needs tokenizer.json, vocab.txt, tokenizer.model, or "
        "encoder.json (or vocab.json) and merges.txt"
    )


def _kind_of_vocabulary(file: AnyPath) -> Vocabulary:
    if any(file.match(pattern) for pattern in SENTENCEPIECE_FILES):
        return "sentencepiece"
    if file.name == "vocab.txt":
        return "vocab.txt"
    if file.name in ("encoder.json", "vocab.json") and (file.parent / "merges.txt").exists():
        return "vocab.json"
    return "tokenizer.json"


def _sentencepiece(file: AnyPath, files: ModelFiles) -> tokenizers.Tokenizer:
    """Load a SentencePiece model, with the tokens that the files beside it add."""
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
    # The normalizer puts a space before the text of a token too, which would not be found then.
    added = files.added_tokens(in_normalized=False)
    named = {token.content for _, token in added if token.special}
    try:
        model = read_model(
            read_bytes(file, MAX_VOCABULARY_BYTES), {*named, *files.special_tokens.values()}
        )
    except ValueError as error:
        raise UserError(f"{file}: {error}; fetch it again, or give a tokenizer.json") from error
    with tokenizer_errors(str(file)):
        backend = make_backend(model)
    _add_tokens(backend, added or files.sentinels(len(model.pieces)), file)
    return backend


def _add_tokens(
    backend: tokenizers.Tokenizer, added: Sequence[tuple[int, AddedToken]], file: AnyPath
) -> None:
    """Add tokens in the order of their ids.

    Raises:
      UserError: A token cannot have its id: the files do not belong together.
    """
    # The library numbers new tokens itself, from the size of the vocabulary on: each gets its own
    # id only if they are added in the order of their ids.
    for token_id, token in added:
        known = backend.token_to_id(token.content)
        if (backend.get_vocab_size() if known is None else known) != token_id:
            raise UserError(
                f"{file.parent}: its settings give token {token.content} the id {token_id}, and "
                f"{file.name} does not; fetch the files that belong together"
            )
        _add_token(backend, token)


def _add_token(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _add_special_tokens(backend: tokenizers.Tokenizer, files: ModelFiles) -> None:
    """Make the tokens special that the files name, and those of the class that there are."""
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    for role in ROLES:
        text = files.special_tokens.get(role, "")
        exists = backend.token_to_id(text) is not None or role in files.named_tokens
        # Not the unknown token: SentencePiece's decoder shows it.
        if exists and text not in special and role != "unk_token":
            backend.add_special_tokens([text])


def _add_post_processor(backend: tokenizers.Tokenizer, files: ModelFiles) -> None:
    """Let the tokenizer put tokens around a text as its class does, if its file has none."""
    if any(tokens_around(backend)):
        return
    tokens = files.special_tokens
    before, after = files.tokenizer_class.before, files.tokenizer_class.after
    if not before and not after and files.vocabulary != "tokenizer.json":
        # A tokenizer.json has been written with what the two flags ask for.
        before = "bos_token" if files.tokenizer_config.get("add_bos_token") else ""
        after = "eos_token" if files.tokenizer_config.get("add_eos_token") else ""
    ids = backend.get_vocab()
    first, last = ([tokens[each]] if tokens.get(each) in ids else [] for each in (before, after))
    if not first and not last:
        return
    special = [(name, ids[name]) for name in {*first, *last}]
    single = [*first, "$A", *last]
    # RoBERTa and its like separate two texts by two tokens, and have one type.
    pair = [*single, *last, "$B", *last]
    if tokens.get("cls_token") == "[CLS]":
        pair = [*single, "$B:1", *(f"{token}:1" for token in last)]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    own = backend.post_processor  # ByteLevel, which moves offsets
    backend.post_processor = template if own is None else processors.Sequence([own, template])


def tokens_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a single text."""
    return _tokens_around(component_spec(backend.post_processor))


def _tokens_around(post_processor: dict[str, Any]) -> tuple[list[int], list[int]]:
    match post_processor:
        case {"type": "Sequence", "processors": steps}:
            parts = [_tokens_around(step) for step in steps]
            return [t for before, _ in parts for t in before], [t for _, end in parts for t in end]
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": special}:
            text = next((i for i, p in enumerate(pieces) if "Sequence" in p), len(pieces))
            before, after = (
                [t for piece in part for t in special[piece["SpecialToken"]["id"]]["ids"]]
                for part in (pieces[:text], pieces[text + 1 :])
            )
            return before, after
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, first], "sep": [_, last]}:
            return [first], [last]
        case _:
            return [], []


def component_spec(component: Any) -> dict[str, Any]:
    """Return a tokenizer's component as in its tokenizer.json; empty if it has none."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _tokenizer_json(file: AnyPath, files: ModelFiles) -> tokenizers.Tokenizer:
    """Load a tokenizer.json, with tokens that the files beside it add after its own."""
    text = _text(file)
    with tokenizer_errors(str(file)):
        backend = tokenizers.Tokenizer.from_str(text)
        for token_id, token in files.added_tokens():
            is_new = backend.token_to_id(token.content) is None
            if is_new and token_id == backend.get_vocab_size():
                _add_token(backend, token)
        return backend


def _gpt2(vocabulary_file: AnyPath, files: ModelFiles) -> tokenizers.Tokenizer:
    """Load byte-level BPE (Radford et al. 2019, section 2.2) from a vocabulary and its merges."""
    try:
        vocabulary = json.loads(_text(vocabulary_file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{vocabulary_file}: not JSON ({error}); fetch it again") from error
    merges_file = vocabulary_file.parent / "merges.txt"
    lines = _text(merges_file).split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    with tokenizer_errors(str(merges_file)):
        merges = [(left, right) for left, right in pairs]
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer_class = files.tokenizer_class
    if tokenizer_class.normalizes:
        backend.normalizer = normalizers.NFC()
    add_prefix_space = bool(files.tokenizer_config.get("add_prefix_space"))
    pattern = tokenizer_class.word_pattern
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=not pattern)
    if pattern:
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, files.added_tokens(), vocabulary_file)
    return backend


def _bert(file: AnyPath, files: ModelFiles) -> tokenizers.Tokenizer:
    """Load WordPiece (Devlin et al. 2019); without a setting, cased if any of its words is."""
    words = _text(file).rstrip("\n").split("\n")
    # vocab.txt does not say whether the model is cased. "[CLS]" and the like are upper-case in all.
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    settings = files.tokenizer_config
    unknown = files.special_tokens.get("unk_token", "[UNK]")
    if unknown not in words:
        raise UserError(
            f"{file}: has no {unknown}, which every vocabulary of BERT has; give a tokenizer.json "
            "instead"
        )
    vocabulary = {word: n for n, word in enumerate(words)}
    with tokenizer_errors(str(file)):
        backend = make_wordpiece_backend(
            vocabulary,
            unknown=unknown,
            lowercase=bool(settings.get("do_lower_case", not cased)),
            strip_accents=settings.get("strip_accents"),
            split_chinese=bool(settings.get("tokenize_chinese_chars", True)),
        )
    _add_tokens(backend, files.added_tokens(), file)
    return backend


_LOADERS: dict[Vocabulary, Callable[[AnyPath, ModelFiles], tokenizers.Tokenizer]] = {
    "tokenizer.json": _tokenizer_json,
    "vocab.json": _gpt2,
    "vocab.txt": _bert,
    "sentencepiece": _sentencepiece,
}


def make_wordpiece_backend(
    vocabulary: dict[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
    unknown: str = "[UNK]",
) -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer of these words, with BERT's normalizer and decoder.

    Args:
      vocabulary: Ids by word.
      lowercase: Words are looked up in lower case.
      strip_accents: Without their accents; None: if in lower case.
      split_chinese: Chinese characters are words of their own.
      unknown: Token of unknown words.
    """
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = [*BERT_SPECIAL_TOKENS, unknown]
    backend.add_special_tokens([name for name in special if name in vocabulary])
    return backend


def _text(file: AnyPath) -> str:
    return decode_text(file, read_bytes(file, MAX_VOCABULARY_BYTES)).replace("\r\n", "\n")


@contextlib.contextmanager
def tokenizer_errors(name: str) -> Iterator[None]:
    """Raise a UserError in place of what the `tokenizers` library raises, panics included."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:  # it raises no narrower class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: damaged, or no tokenizer ({reason}); fetch it again") from error
