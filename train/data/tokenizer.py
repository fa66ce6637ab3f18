"""Tokenizers: text to token ids and back, for every kind.

Long texts are tokenized in chunks, cut only where the tokens do not change. Chunks are tokenized in
parallel and in little memory: a text of 10 MB takes over 2 GB whole.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tokenizers

from train.data.tokenizer_files import (
    component_spec,
    load_backend_tokenizer,
    tokenizer_errors,
    tokens_around,
)
from train.data.tokenizer_settings import TokenizerSettings
from train.errors import UserError, as_user_error
from train.files import AnyPath, expand_path

CHUNK_CHARACTERS = 1 << 16

_BATCH_CHARACTERS = 1 << 20

# Characters on both sides of a cut that are looked at: no pattern of words sees further.
_CONTEXT = 256

# The word tokenizer replaces a newline by this, so that it is a word like the others.
NEWLINE_REPLACEMENT = " <eos> "

WORD_BOUNDARY = re.compile(r"(?<=\S)[ \n]")
"""A space or a newline after any other character. The tokenizers that are trained here end a word
there, whatever follows, and begin the next one without looking back."""

# Where words of published tokenizers may end: Chinese has punctuation and no spaces.
_CANDIDATE = re.compile(r"(?<=\S)[ \n、。，！？]")

IsCut = Callable[[str, str], bool]
"""Function that returns True if a text may be cut between two parts, the ends of which it gets."""


def split_into_chunks(
    pieces: Iterable[str],
    boundary: re.Pattern[str] = WORD_BOUNDARY,
    is_cut: IsCut = lambda before, after: True,
    size: int = CHUNK_CHARACTERS,
) -> Iterator[str]:
    """Yield chunks of ``size`` characters or more, but for the last, of the joined pieces.

    A chunk begins at a `boundary` that `is_cut` accepts.
    """
    rest, position = "", size
    for piece in itertools.chain(pieces, [None]):
        rest += piece or ""
        # What follows a cut must be seen, unless nothing follows.
        end = len(rest) - (_CONTEXT if piece is not None else 0)
        start = 0
        while match := boundary.search(rest, position, max(end, 0)):
            at = match.start()
            if is_cut(rest[max(start, at - _CONTEXT) : at], rest[at : at + _CONTEXT]):
                yield rest[start:at]
                start, position = at, at + size
            else:  # the longer the chunk gets, the further apart are the tries
                position = at + 1 + (at - start - size) // 8
        rest, position = rest[start:], max(position, end) - start
    yield rest


# Name of the document separator where no file names one: in tokenizers trained here, and others.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]", "<|im_end|>")


# Name of the mask token in each family. The first is added to a tokenizer that has none.
_MASK_NAMES = ("[MASK]", "<mask>")

_LANGUAGE = re.compile(r"__([a-z]{2,3})__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
"""Name of a special token for a language: __de__ of M2M-100, de_DE of mBART, deu_Latn of NLLB."""


class TokenPair(NamedTuple):
    """Two texts as one sequence of tokens."""

    tokens: np.ndarray  # [T] int32
    types: np.ndarray  # [T] int32, 0 for the first text and often 1 for the second
    start: int
    """Index of the second text's first token."""
    spans: np.ndarray  # [t, 2] int32
    """First character of each token of the second text, and that after its last."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the tokens that language models need.

    Special tokens that are spelled out in a text are tokenized as plain text, so that no text can
    forge the end of a document.

    What separates documents, begins a text and ends one is decided in one place, here: by the
    model's files (`TokenizerSettings` and the tokenizer's template), and only without them by name.

    Attributes:
      eos_token_id: Separator of documents; generation starts with it, if no other token begins a
        text: the last token of the template, the end token that the files name, or a known name.
      end_token_ids: Tokens that end a generated text: those that the files name, and the
        separator, unless texts contain it (the word tokenizer uses it for a newline). The one of
        the chat template is in `chat_template.end_tokens`.
      added_token_ids: Tokens that a published tokenizer puts before and after every text, two
        arrays [n] and [m] int32; often none. Llama's <s>, and BERT's [CLS] and [SEP].
      decoder_start_token_id: First token that the decoder of a translation model reads.
      forced_bos_token_id: First token that it writes, or None: whichever is the most likely.
      language_token_ids: Special tokens of languages by the code: de, de_DE or deu_Latn.
      cls_token_id: First token of a text to classify: [CLS] if there is one, else eos_token_id.
      mask_token_id: Token that hides another one, or None; see `with_mask_token`.
      special_token_ids: Tokens that are not part of any text.
      control_token_ids: Tokens beyond those of the model, special or not, but for white space.
      vocab_size: One more than the largest token id, or the rows of the model's table, if those
        are fewer. A text that needs another token is refused.
      vocabulary: Token ids by token.
      has_word_tokens: True if each token is a whole word.
      digest: Equal for equal tokenizers.
      settings: What is stored beside the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        origin: str = "tokenizer",
        settings: TokenizerSettings = TokenizerSettings(),  # noqa: B008
    ):
        self.settings = settings
        self.chat_template = settings.chat_template
        self.special_token_names = dict(settings.special_tokens)
        self._origin = origin
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        vocabulary = backend.get_vocab()
        self.num_tokens = max(vocabulary.values(), default=-1) + 1
        if self.num_tokens > np.iinfo(np.int32).max:
            raise UserError(f"{origin}: has a token id above 2^31; fetch it again")
        self.vocab_size = min(self.num_tokens, settings.num_embeddings or self.num_tokens)
        self.vocabulary: dict[str, int] = {
            text: token for text, token in vocabulary.items() if token < self.vocab_size
        }
        vocabulary = self.vocabulary
        self.has_word_tokens = component_spec(backend.model)["type"] == "WordLevel"
        before, after = tokens_around(backend)
        self.added_token_ids = np.array(before, np.int32), np.array(after, np.int32)
        added = backend.get_added_tokens_decoder()
        self.language_token_ids = {
            match[1] or match[2]: token_id
            for token_id, token in added.items()
            if token.special and (match := _LANGUAGE.fullmatch(token.content))
        }
        languages = {*self.language_token_ids.values()}
        after = [token for token in after if token not in languages]
        named = [vocabulary.get(settings.special_tokens.get("eos_token", ""))]
        usual = [vocabulary.get(name) for name in _SEPARATORS]
        candidates = [*after[-1:], *named, *settings.end_token_ids, *usual]
        separators = [token for token in candidates if token is not None]
        if not separators:
            raise UserError(
                f"{origin}: has no token that separates documents; name it as eos_token in "
                f"tokenizer_config.json, or add one of {' '.join(_SEPARATORS)}"
            )
        self.eos_token_id = separators[0]
        with tokenizer_errors(origin):
            newline = backend.encode("\n", add_special_tokens=False).ids
        ends = [*settings.end_token_ids, *({self.eos_token_id} - {*newline})]
        self.end_token_ids = tuple(dict.fromkeys(ends))
        start = settings.decoder_start_token_id
        self.decoder_start_token_id = self.eos_token_id if start is None else start
        self.forced_bos_token_id = settings.forced_bos_token_id
        cls_name = settings.special_tokens.get("cls_token", "[CLS]")
        self.cls_token_id = vocabulary.get(cls_name, self.eos_token_id)
        masks = [settings.special_tokens.get("mask_token", ""), *_MASK_NAMES]
        self.mask_token_id = next((vocabulary[name] for name in masks if name in vocabulary), None)
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special and token_id < self.vocab_size
        )
        self.control_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.content.strip()
        )
        self._names_without_row = [
            token.content for token_id, token in added.items() if token_id >= self.vocab_size
        ]
        self._special_names = [token.content for token in added.values() if token.special]
        self._characters = _characters(backend)
        self._words = _words(backend)

    @classmethod
    def load(cls, path: str | AnyPath) -> Tokenizer:
        """Load a tokenizer.json, a vocab.txt, or a folder that holds either or GPT-2's files.

        Raises:
          UserError: It is missing, damaged, or has no token to separate documents.
        """
        backend, settings = load_backend_tokenizer(str(path))
        return cls(backend, str(path), settings)

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return this tokenizer with another chat template."""
        if template == self.chat_template:
            return self
        settings = dataclasses.replace(self.settings, chat_template=template)
        return Tokenizer(self._copy_backend(), self._origin, settings)

    def with_num_embeddings(self, num_embeddings: int) -> Tokenizer:
        """Return this tokenizer for a model's table of `num_embeddings` rows.

        Raises:
          UserError: Tokens of ordinary text have no row: the tokenizer is that of another model.
        """
        if num_embeddings >= self.num_tokens:
            return self
        added = self._backend.get_added_tokens_decoder()
        tokens = self._backend.get_vocab(with_added_tokens=False).values()
        if any(token >= num_embeddings and token not in added for token in tokens):
            raise UserError(
                f"{self._origin}: its tokenizer has {self.num_tokens} tokens and the model "
                f"{num_embeddings}; fetch the tokenizer that belongs to the model"
            )
        settings = dataclasses.replace(self.settings, num_embeddings=num_embeddings)
        return Tokenizer(self._copy_backend(), self._origin, settings)

    def with_mask_token(self) -> Tokenizer:
        """Return this tokenizer, with a mask token added if it has none."""
        if self.mask_token_id is not None:
            return self
        backend = self._copy_backend()
        backend.add_special_tokens([_MASK_NAMES[0]])
        settings = dataclasses.replace(self.settings, num_embeddings=None)
        return Tokenizer(backend, self._origin, settings)

    def _copy_backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.to_json())

    def to_json(self) -> str:
        """Return the text of the tokenizer.json that `load` reads."""
        return self._backend.to_str(pretty=True)

    def save(self, path: str | AnyPath) -> None:
        """Write a tokenizer.json. ``path`` is the file, and may be remote."""
        with as_user_error(str(path)):
            expand_path(str(path)).write_text(self.to_json(), encoding="utf-8")

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def text_frame(self) -> tuple[np.ndarray, np.ndarray]:  # [n] and [m] int32
        """Tokens that a model expects before and after a text that it reads alone.

        Those that a published tokenizer adds, and before a text otherwise the token that separates
        documents: training windows have the same (`DocumentFrame`).
        """
        before, after = self.added_token_ids
        return (before if len(before) else np.array([self.eos_token_id], np.int32)), after

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
        self._check_rows(text)
        plain = text
        for name in self._special_names:
            plain = plain.replace(name, "")
        self._check(plain)
        with tokenizer_errors(self._origin):
            encoding = self._parsing_backend.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        return np.array(encoding.ids, np.int32), starts

    def encode_pair(self, first: str, second: str) -> TokenPair:
        """Return two texts as one sequence, with the tokens that the tokenizer puts around them.

        A tokenizer that adds none gets `cls_token_id` before, and its separator after each text.

        Raises:
          UserError: A text has characters for which the tokenizer has no token.
        """
        return next(self.encode_pairs([(first, second)]))

    def encode_pairs(self, pairs: Iterable[tuple[str, str]]) -> Iterator[TokenPair]:
        """Yield `encode_pair` of each pair, tokenized in batches on all cores."""
        adds_tokens = any(map(len, self.added_token_ids))
        for batch in _batches(pairs):
            for text in itertools.chain.from_iterable(batch):
                self._check_rows(text)
                self._check(text)
            with tokenizer_errors(self._origin):
                encodings = self._backend.encode_batch(batch)
            for encoding in encodings:
                texts = np.array([-1 if x is None else x for x in encoding.sequence_ids], np.int32)
                tokens, types = np.array(encoding.ids, np.int32), np.array(encoding.type_ids)
                offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
                if not adds_tokens:
                    # Before all, between the texts, and at the end.
                    places = [0, int(np.sum(texts == 0)), len(tokens)]
                    separator = self.eos_token_id
                    tokens = np.insert(tokens, places, [self.cls_token_id, separator, separator])
                    types = np.insert(texts, places, [0, 0, 1])
                    texts = np.insert(texts, places, -1)
                    offsets = np.insert(offsets, places, 0, axis=0)
                is_second = texts == 1
                start = int(np.argmax(is_second)) if is_second.any() else len(tokens)
                yield TokenPair(
                    tokens.astype(np.int32), types.astype(np.int32), start, offsets[is_second]
                )

    @functools.cached_property
    def _parsing_backend(self) -> tokenizers.Tokenizer:
        backend = self._copy_backend()
        backend.encode_special_tokens = False
        return backend

    def encode_documents(
        self, texts: Iterable[str], on_characters: Callable[[int], None] = lambda count: None
    ) -> Iterator[np.ndarray]:  # each [T] int32
        """Yield the tokens of each text, in order, tokenized in batches on all cores.

        `on_characters` is called with the number of characters of each batch.
        """
        for parts in self.encode_pieces(((text,) for text in texts), on_characters):
            first, *others = parts
            yield np.concatenate([first, *others]) if others else first

    def encode_pieces(
        self,
        texts: Iterable[Iterable[str]],
        on_characters: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Iterator[np.ndarray]]:  # each [t] int32
        """Yield the tokens of each text part by part; the parts are read before the next text.

        The pieces of a text, cut anywhere, are read as they are needed.
        """
        for _, parts in itertools.groupby(
            self._encode_chunks(texts, on_characters), lambda x: x[0]
        ):
            yield (tokens for _, tokens in parts)

    def _encode_chunks(
        self, texts: Iterable[Iterable[str]], on_characters: Callable[[int], None]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the tokens of each chunk, with the number of its text."""
        for batch in _batches(self._chunks(texts)):
            chunks = [chunk for _, chunk in batch]
            with tokenizer_errors(self._origin):
                encodings = self._backend.encode_batch_fast(chunks, add_special_tokens=False)
            on_characters(sum(map(len, chunks)))
            for (number, _), encoding in zip(batch, encodings, strict=True):
                yield number, np.array(encoding.ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens without special ones. Invalid UTF-8 becomes U+FFFD."""
        with tokenizer_errors(self._origin):
            return self._backend.decode([int(token) for token in tokens], skip_special_tokens=True)

    def _check_rows(self, text: str) -> None:
        """Raise UserError for tokens that the model's table has no row for, spelled out."""
        for name in self._names_without_row:
            if name in text:
                raise UserError(
                    f"the text: has {name}, a token beyond the model's {self.vocab_size}; leave it "
                    "out"
                )

    def _chunks(self, texts: Iterable[Iterable[str]]) -> Iterator[tuple[int, str]]:
        """Yield the chunks of all texts, each with the number of its text."""
        for number, pieces in enumerate(texts):
            for chunk in split_into_chunks(pieces, _CANDIDATE, self._is_cut):
                self._check_rows(chunk)
                self._check(chunk)
                yield number, chunk

    def _is_cut(self, before: str, after: str) -> bool:
        """Return True if the parts of a text have the words and tokens that they have together."""
        splitter, normalizer = self._backend.pre_tokenizer, self._backend.normalizer
        if splitter is None:  # then a token may depend on all of the text
            return self._characters is not None

        def words(text: str) -> list[str]:
            normal = normalizer.normalize_str(text) if normalizer else text
            return [word for word, _ in splitter.pre_tokenize_str(normal)]

        def tokens(text: str) -> list[int]:  # those that are added are found before the words
            return self._backend.encode(text, add_special_tokens=False).ids

        with tokenizer_errors(self._origin):
            return all(
                split(before + after) == split(before) + split(after) for split in (words, tokens)
            )

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
        with tokenizer_errors(self._origin):
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

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain (of one often a word, or nothing)."""
        self._tokens += tokens
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
    """Return the characters of a tokenizer that drops others; None: it drops none."""
    model = component_spec(backend.model)
    drops_unknown = (
        backend.pre_tokenizer is None
        and model["type"] == "BPE"
        and not (model["merges"] or model["unk_token"] or model["byte_fallback"])
    )
    return frozenset(model["vocab"]) if drops_unknown else None


def _words(backend: tokenizers.Tokenizer) -> frozenset[str] | None:
    """Return the words of a tokenizer that drops others; None: it drops none."""
    model = component_spec(backend.model)
    drops_unknown = model["type"] == "WordLevel" and model["unk_token"] not in model["vocab"]
    return frozenset(model["vocab"]) if drops_unknown else None


Item = TypeVar("Item", bound=tuple[Any, ...])


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Group tuples with texts so that a batch keeps all cores busy and takes little memory."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += sum(len(each) for each in item if isinstance(each, str))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
