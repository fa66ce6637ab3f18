"""Tokenizers: text to token ids and back, for every kind.

Long texts are tokenized in chunks, cut only where the tokens do not change. Chunks are tokenized in
parallel and in little memory: a text of 10 MB takes over 2 GB whole.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from train.data.files import AnyPath

CHUNK_CHARACTERS = 1 << 16


# The word tokenizer replaces a newline by this, so that it is a word like the others.
NEWLINE_REPLACEMENT = " <eos> "


# A space or a newline after any other character. GPT-2's pattern, BERT's and a split on white
# space all end a word there, whatever follows, and begin the next one without looking back.
_BOUNDARY = re.compile(r"(?<=\S)[ \n]")


def split_into_chunks(text: str, size: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Yield chunks of ``size`` characters or slightly more, which join to the text."""
    start = 0
    while boundary := _BOUNDARY.search(text, start + size):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]


def can_be_chunked(backend: tokenizers.Tokenizer) -> bool:
    """Return True if the tokens of the chunks of any text are the tokens of the text."""
    if not _keeps_boundaries(component_spec(backend.normalizer)):
        return False
    splitter = component_spec(backend.pre_tokenizer)
    if not splitter:
        return is_character_model(component_spec(backend.model))
    if splitter["type"] == "ByteLevel":
        return bool(splitter["use_regex"]) and not splitter["add_prefix_space"]
    return splitter["type"] in ("BertPreTokenizer", "WhitespaceSplit")


def is_character_model(model: dict[str, Any]) -> bool:
    """Return True if a model gives each character its own token and drops unknown ones.

    Args:
      model: The model as `component_spec` returns it.
    """
    return (
        model["type"] == "BPE"
        and not model["merges"]
        and not model["unk_token"]
        and not model["byte_fallback"]
    )


def component_spec(component: Any) -> dict[str, Any]:
    """Return a tokenizer's component as in its tokenizer.json; empty if it has none."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _keeps_boundaries(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {} if not normalizer:
            return True
        case {"type": "Sequence", "normalizers": steps}:
            return all(_keeps_boundaries(step) for step in steps)
        case {"type": "Replace", **rest}:
            return rest == {"pattern": {"String": "\n"}, "content": NEWLINE_REPLACEMENT}
        case _:
            return normalizer["type"] in ("Lowercase", "BertNormalizer")


# Name of the document separator in each family of tokenizers.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]", "<|im_end|>")


# Name of the mask token in each family. The first is added to a tokenizer that has none.
_MASK_NAMES = ("[MASK]", "<mask>")


_BATCH_CHARACTERS = 1 << 22


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the tokens that language models need.

    Special tokens that are spelled out in a text are tokenized as plain text, so that no text can
    forge the end of a document.

    Attributes:
      eos_token_id: Separator of documents; generation starts with it.
      stop_token_id: Token that ends generation: eos_token_id, or None if texts contain that token
        (the word tokenizer uses it for a newline).
      cls_token_id: First token of a text to classify: [CLS] if there is one, else eos_token_id.
      mask_token_id: Token that hides another one, or None; see `with_mask_token`.
      special_token_ids: Tokens that are not part of any text.
      vocab_size: One more than the largest token id.
      vocabulary: Token ids by token.
      has_word_tokens: True if each token is a whole word.
      digest: Equal for equal tokenizers.
      chat_template: Jinja template of conversations; empty if there is none.
      special_token_names: Special tokens by their names in the template: `eos_token`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        origin: str = "tokenizer",
        *,
        chat_template: str = "",
        special_token_names: Mapping[str, str] | None = None,
    ):
        self.chat_template = chat_template
        self.special_token_names = dict(special_token_names or {})
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.vocabulary: dict[str, int] = backend.get_vocab()
        self.has_word_tokens = component_spec(backend.model)["type"] == "WordLevel"
        vocabulary = self.vocabulary
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_token_id = _end_of_text(vocabulary, origin)
        newline = backend.encode("\n", add_special_tokens=False).ids
        self.stop_token_id = None if self.eos_token_id in newline else self.eos_token_id
        self.cls_token_id = vocabulary.get("[CLS]", self.eos_token_id)
        self.mask_token_id = next(
            (vocabulary[name] for name in _MASK_NAMES if name in vocabulary), None
        )
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self._special_names = [token.content for token in added.values() if token.special]
        self._can_be_chunked = can_be_chunked(backend)
        self._characters = _characters(backend)
        self._words = _words(backend)

    @classmethod
    def load(cls, path: str | AnyPath) -> Tokenizer:
        """Load a tokenizer.json, a vocab.txt, or a folder that holds either or GPT-2's files.

        Raises:
          UserError: It is missing, damaged, or has no token to separate documents.
        """
        from train.data.tokenizer_files import load_backend_tokenizer, load_chat_files

        template, names = load_chat_files(str(path))
        backend = load_backend_tokenizer(str(path))
        return cls(backend, str(path), chat_template=template, special_token_names=names)

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return this tokenizer with another chat template."""
        if template == self.chat_template:
            return self
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.to_json())
        names = self.special_token_names
        return Tokenizer(backend, chat_template=template, special_token_names=names)

    def with_mask_token(self) -> Tokenizer:
        """Return this tokenizer, with a mask token added if it has none."""
        if self.mask_token_id is not None:
            return self
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.to_json())
        backend.add_special_tokens([_MASK_NAMES[0]])
        names = self.special_token_names
        return Tokenizer(backend, chat_template=self.chat_template, special_token_names=names)

    def to_json(self) -> str:
        """Return the text of the tokenizer.json that `load` reads."""
        return self._backend.to_str(pretty=True)

    def save(self, path: str | AnyPath) -> None:
        """Write a tokenizer.json. ``path`` is the file, and may be remote."""
        from train.data.files import expand_path
        from train.errors import as_user_error

        with as_user_error(str(path)):
            expand_path(str(path)).write_text(self.to_json(), encoding="utf-8")

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:  # [T] int32
        """Return the tokens of a text. No special tokens are added.

        Raises:
          UserError: The text has characters for which the tokenizer has no token.
        """
        return next(self.encode_documents([text]))

    def encode_with_special_tokens(
        self, text: str
    ) -> tuple[np.ndarray, np.ndarray]:  # [T] int32, [T] int64
        """Return the tokens of a text, and the character that each begins at.

        Special tokens that are spelled out become single tokens. For texts that a chat template has
        written: anyone who writes a message can write them too.
        """
        plain = text
        for name in self._special_names:
            plain = plain.replace(name, "")
        self._check(plain)
        encoding = self._parsing_backend.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        return np.array(encoding.ids, np.int32), starts

    @functools.cached_property
    def _parsing_backend(self) -> tokenizers.Tokenizer:
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.to_json())
        backend.encode_special_tokens = False
        return backend

    @functools.cached_property
    def added_token_ids(self) -> tuple[np.ndarray, np.ndarray]:  # [n] and [m] int32
        """Tokens that a published tokenizer puts before and after every text; often none.

        Llama's <s>, and BERT's [CLS] and [SEP].
        """
        added = _added_tokens(component_spec(self._backend.post_processor))
        before, after = ([self.vocabulary[name] for name in names] for names in added)
        return np.array(before, np.int32), np.array(after, np.int32)

    def encode_documents(
        self, texts: Iterable[str], on_characters: Callable[[int], None] = lambda count: None
    ) -> Iterator[np.ndarray]:  # each [T] int32
        """Yield the tokens of each text, in order, tokenized in batches on all cores.

        Args:
          texts: The texts.
          on_characters: Called with the number of characters of each batch that is tokenized.
        """
        parts = []
        for batch in _batches(self._chunks(texts)):
            chunks = [chunk for chunk, _ in batch]
            encodings = self._backend.encode_batch_fast(chunks, add_special_tokens=False)
            on_characters(sum(map(len, chunks)))
            for encoding, (_, last) in zip(encodings, batch, strict=True):
                parts.append(np.array(encoding.ids, np.int32))
                if last:
                    yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                    parts = []

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens without special ones. Invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode([int(token) for token in tokens], skip_special_tokens=True)

    def _chunks(self, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
        """Yield the chunks of all texts, each with True if it is the last of its text."""
        for text in texts:
            self._check(text)
            chunks = list(split_into_chunks(text)) if self._can_be_chunked else [text]
            for number, chunk in enumerate(chunks, start=1):
                yield chunk, number == len(chunks)

    def _check(self, text: str) -> None:
        """Raise UserError for characters that the tokenizer would drop silently."""
        _check_unicode(text)
        if self._words is not None and (unknown := sorted({*text.split()} - self._words)):
            raise UserError(
                f"the text: has words that the tokenizer lacks ({' '.join(unknown[:10])}); give "
                f"some of its {len(self._words)}, such as {min(self._words)}"
            )
        if self._characters is None:
            return
        normalizer = self._backend.normalizer
        characters = set(normalizer.normalize_str(text) if normalizer else text)
        if unknown := sorted(characters - self._characters):
            shown = " ".join(map(repr, unknown[:10])) + (" ..." if unknown[10:] else "")
            raise UserError(
                f"the text: has characters that the tokenizer lacks ({shown}); leave them out, or "
                "train with data.tokenizer.kind byte or bpe, which have them all"
            )


def _check_unicode(text: str) -> None:
    """Raise UserError for surrogates without their other half, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text: {error.reason} at character {error.start}; give valid Unicode"
        ) from error


def _added_tokens(post_processor: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the tokens that a post-processor puts before and after a single text."""
    match post_processor:
        case {"type": "Sequence", "processors": steps}:
            added = [_added_tokens(step) for step in steps]
            return [t for before, _ in added for t in before], [t for _, end in added for t in end]
        case {"type": "TemplateProcessing", "single": pieces}:
            text = next((i for i, p in enumerate(pieces) if "Sequence" in p), len(pieces))
            parts = pieces[:text], pieces[text + 1 :]
            before, after = ([piece["SpecialToken"]["id"] for piece in part] for part in parts)
            return before, after
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [first, _], "sep": [last, _]}:
            return [first], [last]
        case _:
            return [], []


MAX_TOKENS_BEFORE = 64
"""Last tokens of a prompt that the decoding of the next token depends on, and some more."""


class StreamDecoder:
    """Incremental decoder: the results of `push` and `flush` join to the text of all tokens.

    A character of several tokens is held back until it is complete. Only the tokens since the last
    returned text are decoded again, so that the cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] | np.ndarray = ()):
        """Set up the decoder of the tokens that follow `before`."""
        self._tokenizer = tokenizer
        # Tokens whose text has been returned. They decide if a space precedes the next token.
        self._before: list[int] = [int(token) for token in before[-MAX_TOKENS_BEFORE:]]
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain (often one word, or nothing)."""
        self._tokens.append(int(token))
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return self._show(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        shown = self._show(text)
        if shown:
            self._before, self._tokens, self._shown = self._tokens, [], ""
        return shown

    def flush(self) -> str:
        """Return the rest: the characters that never became complete."""
        return self._show(self._text())

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._tokens)[len(before) :]

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown = text if new else self._shown
        return new


def _characters(backend: tokenizers.Tokenizer) -> frozenset[str] | None:
    """Return the characters that the tokenizer accepts; None: all."""
    if backend.pre_tokenizer is not None:
        return None
    model = component_spec(backend.model)
    return frozenset(model["vocab"]) if is_character_model(model) else None


def _words(backend: tokenizers.Tokenizer) -> frozenset[str] | None:
    """Return the words that a tokenizer of words accepts; None: all, or another tokenizer."""
    model = component_spec(backend.model)
    if model["type"] != "WordLevel" or model["unk_token"] in model["vocab"]:
        return None
    return frozenset(model["vocab"])


def _end_of_text(vocabulary: dict[str, int], origin: str) -> int:
    for name in _EOS_NAMES:
        if name in vocabulary:
            return vocabulary[name]
    raise UserError(
        f"{origin}: has no token that separates documents; add one of {' '.join(_EOS_NAMES)}"
    )


def _batches(items: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Group chunks so that a batch keeps all cores busy and takes little memory."""
    batch, characters = [], 0
    for item in items:
        batch.append(item)
        characters += len(item[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
