"""Tagged words: CoNLL files, encoding, and batches for token classification."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    ExampleSplits,
    check_text_pair,
    encode_splits,
    label_indices,
    read_splits,
    tokenize_examples,
    tokenizer_for_splits,
)
from train.data.files import Notes, TextFile
from train.data.rows import (
    FORMATS_PAGE,
    Row,
    file_rows,
    find_format,
    line_location,
    open_decompressed,
)
from train.data.text_files import read_lines
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from transformer.validation import Bounds, Mark

TagColumn = Literal["upos", "xpos"]


@dataclasses.dataclass(frozen=True)
class TokenLabelDataConfig(ExampleDataConfig):
    """Sentences of tagged words: one word a line, and an empty line after each sentence.

    A file is CoNLL-U (Universal Dependencies), or has the word in the first column and its tag in
    the last (CoNLL 2000, 2002, 2003), or rows of JSON or Parquet with lists `tokens` and `tags`.
    """

    tag_column: TagColumn = "upos"
    """CoNLL-U: the universal tags, or those of the language."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 128
    """Maximum number of tokens of a row. A longer sentence is cut between words into several rows,
    so that no word is lost."""


CONLLU_COLUMNS = 10
_UPOS_COLUMN = 3

# Ids of multiword tokens (3-4) and of empty nodes (8.1).
_NOT_A_WORD_ID = re.compile(r"\d+-\d+|\d+\.\d+")

_DOCUMENT_START = "-DOCSTART-"


class TaggedWord(NamedTuple):
    """A word, its tag, and the location of its line for error messages."""

    text: str
    tag: str
    location: str


TaggedSentence = Sequence[TaggedWord]


def _own_sentence(location: str, words: Iterable[Any]) -> TaggedSentence:
    """Return a sentence that a dataset of the user yields: words and their tags."""
    pairs = [check_text_pair(location, word) for word in words]
    if not pairs:
        raise UserError(f"{location}: has no words; leave it out")
    return [TaggedWord(*pair, f"{location}:{number}") for number, pair in enumerate(pairs, start=1)]


_WORD_FIELDS = ("tokens", "words")
_TAG_FIELDS = ("tags", "ner_tags", "pos_tags", "upos", "labels", "ner", "pos")


def read_tagged_sentences(config: TokenLabelDataConfig) -> ExampleSplits[TaggedSentence]:
    """Return the sentences of every split."""

    def read(files: Sequence[TextFile], notes: Notes) -> Iterator[tuple[str, Any]]:
        for file in files:
            with open_decompressed(file) as stream:
                kind = find_format(stream, file)
            sentences: Iterable[TaggedSentence | None]
            if kind in ("text", "csv"):
                sentences = read_sentences(config, file, notes)
            else:
                sentences = (_sentence_of_row(row, config) for row in file_rows(file))
            yield from ((str(file.path), sentence) for sentence in sentences)

    return read_splits(config, lambda location, sentence: sentence, _own_sentence, read=read)


def _sentence_of_row(row: Row, config: TokenLabelDataConfig) -> TaggedSentence | None:
    """Return the sentence of {"tokens": [...], "tags": [...]}; None if one of both is null."""
    location, value = row.location, row.value
    names = [*value] if isinstance(value, Mapping) else []
    words, tags = (
        next((value[name] for name in fields if name in names), ())
        for fields in (_WORD_FIELDS, (config.tag_column, *_TAG_FIELDS))
    )
    if words is None or tags is None:
        return None
    if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags):
        raise UserError(
            f"{location}: has no lists {_WORD_FIELDS[0]!r} and {_TAG_FIELDS[0]!r} of one length "
            f"(it has {', '.join(names)[:200] or 'none'}); give them ({FORMATS_PAGE}#tagged-words)"
        )
    pairs = zip(words, map(str, tags), strict=True)
    return [TaggedWord(*check_text_pair(location, each), location) for each in pairs] or None


def read_sentences(
    config: TokenLabelDataConfig, file: TextFile, notes: Notes
) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file of columns. Raises UserError if it is malformed."""
    lines = read_lines(file)
    cells = [line.split("\t") for line in lines]
    is_conllu = any(len(each) == CONLLU_COLUMNS and each[0].isdecimal() for each in cells)
    read = _conllu_word(config) if is_conllu else _columns_word(lines)
    words: list[TaggedWord] = []
    num_comments = 0
    for index, line in enumerate([*lines, ""]):
        location = line_location(file, index)
        if not line.strip():
            if words:
                yield words
            words = []
        elif (word := read(line, location, not words)) is not None:
            words.append(TaggedWord(*word, location))
        else:
            num_comments += line.startswith("# ") and not is_conllu
    if num_comments:
        notes.add(file.path, "lines with '# ' before a sentence, read as comments", num_comments)


ReadWord = Callable[[str, str, bool], tuple[str, str] | None]
"""Function of a line, its location, and whether no word of its sentence precedes it. It returns
the word and its tag, or None if it is none."""


def _columns_word(lines: Sequence[str]) -> ReadWord:
    """Return a function that reads the first column and the last."""
    marks = ("# ", _DOCUMENT_START)
    plain = [line for line in lines if line.strip() and not line.startswith(marks)]
    # Words may contain spaces where tabs separate the columns, and no-break spaces everywhere.
    separator = re.compile(r"\t" if plain and all("\t" in line for line in plain) else r"[ \t]+")
    shapes = {
        (len(cells), cells[-1]) for line in plain for cells in [separator.split(line.strip(" \t"))]
    }

    def word(line: str, location: str, is_first: bool) -> tuple[str, str] | None:
        cells = separator.split(line.strip(" \t"))
        if cells[0] == _DOCUMENT_START:
            return None
        # A comment, unless it has the columns and a tag of the other lines: `#` may be a word.
        if line.startswith("# ") and is_first and (len(cells), cells[-1]) not in shapes:
            return None
        if len(cells) < 2 or not cells[-1]:
            raise UserError(
                f"{location}: has one column only; a word must be the first and its tag the last "
                f"({FORMATS_PAGE}#tagged-words)"
            )
        return cells[0], cells[-1]

    return word


def _conllu_word(config: TokenLabelDataConfig) -> ReadWord:
    """Return a function that reads a line of CoNLL-U (universaldependencies.org/format.html).

    It returns None for comments, for surface forms of several words (3-4), whose words follow on
    lines of their own, and for words that the text omits (8.1).
    """
    column = _UPOS_COLUMN + (config.tag_column == "xpos")

    def word(line: str, location: str, is_first: bool) -> tuple[str, str] | None:
        cells = line.split("\t")
        if line.startswith("#") or _NOT_A_WORD_ID.fullmatch(cells[0]):
            return None
        if len(cells) != CONLLU_COLUMNS or not cells[0].isdecimal():
            raise UserError(
                f"{location}: is not a word number and the other {CONLLU_COLUMNS - 1} columns of "
                f"CoNLL-U; correct it ({FORMATS_PAGE}#tagged-words)"
            )
        if cells[column] == "_":
            raise UserError(
                f"{location}: word {cells[1]!r} has no {config.tag_column}; tag it, or "
                "set data.tag_column to other tags that the file has"
            )
        return cells[1], cells[column]

    return word


NO_TAG = -1
"""Target of the tokens of a word after its first, in place of a tag's index."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenLabelSplit:
    """Tokenized sentences of a split. A long sentence takes several rows."""

    tokens: RaggedArray
    targets: RaggedArray
    """For each token the index of its word's tag if it is the word's first, else `NO_TAG`."""
    sentence_indices: np.ndarray  # [n] int64
    """Index of the sentence of each row, ascending."""
    labels: tuple[str, ...]

    @property
    def lengths(self) -> np.ndarray:  # [n, 1]
        """Number of tokens of each row."""
        return self.tokens.lengths[:, None]

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some rows, padded to T tokens.

        Returns:
          tokens: [B, T] int32.
          segments: [B, T] int32, 1 where tokens are not padding.
          targets: [B, T] int32, the tag of each word at its first token; 0 elsewhere.
          weights: [B, T] float32, 1 at first tokens.
          examples: [B] uint32, the indices of the rows within the split.
        """
        tokens, real = self.tokens.pad(indices, lengths[0])
        targets, _ = self.targets.pad(indices, lengths[0])
        first = real & (targets != NO_TAG)
        return {
            "tokens": tokens,
            "segments": real.astype(np.int32),
            "targets": np.where(first, targets, 0),
            "weights": first.astype(np.float32),
            "examples": example_ids(np.maximum(indices, 0)),
        }

    def tags(self, predictions: Sequence[np.ndarray] | None = None) -> list[list[str]]:
        """Return the tags of every sentence.

        Args:
          predictions: For each row the predicted tag of each token: [T] or longer. None: the true
            tags.
        """
        sentences: list[list[str]] = [[] for _ in range(self.sentence_indices[-1] + 1)]
        for row, sentence in enumerate(self.sentence_indices):
            targets = self.targets[row]
            values = targets if predictions is None else predictions[row]
            first = np.flatnonzero(targets != NO_TAG)
            sentences[sentence] += [self.labels[number] for number in values[first]]
        return sentences


def prepare_token_labels(
    config: TokenLabelDataConfig,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
) -> ExampleCorpus[TokenLabelSplit]:
    """Read and tokenize the sentences that ``config`` names.

    A `tokenizer` and `labels` take the place of those of the settings and of ``config.path``.

    Raises:
      UserError: A file is missing, empty or not UTF-8, a line is malformed, or a tag is not among
        ``labels``.
    """
    splits = read_tagged_sentences(config)
    names = tuple(labels or sorted({word.tag for each in splits.all_training for word in each}))
    used = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {
            split: (f" {' '.join(word.text for word in sentence)}" for sentence in sentences)
            for split, sentences in splits.items()
        },
    )

    def encode(split: str, sentences: Sequence[TaggedSentence]) -> TokenLabelSplit:
        words = [[word.text for word in sentence] for sentence in sentences]
        tags = [
            label_indices(((word.tag, word.location) for word in sentence), names, "tag")
            for sentence in sentences
        ]
        length = config.max_length
        encoded = make_token_label_split(used, words, tags, labels=names, max_length=length)
        if num_extra := len(encoded.sentence_indices) - len(sentences):
            splits.notes.append(
                f"the {split} split: sentences of more than data.max_length {length} tokens "
                f"continue in further rows, {num_extra:,} beside the {len(sentences):,} first ones"
            )
        return encoded

    return encode_splits(
        splits,
        used,
        encode,
        content=lambda sentence: [word[:2] for word in sentence],
        labels=names,
        identity={"labels": names},
    )


def make_token_label_split(
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    tags: Sequence[Sequence[int]],
    *,
    labels: tuple[str, ...],
    max_length: int,
) -> TokenLabelSplit:
    """Return the rows, of at most `max_length` tokens, of sentences and the tag of each word."""
    # Each different word is tokenized once: words of natural text repeat.
    tokens_of = encode_words(tokenizer, itertools.chain.from_iterable(sentences))
    before, after = tokenizer.added_token_ids
    room = max_length - len(before) - len(after)
    tokens, targets, sentence_indices = [], [], []
    for index, words in enumerate(sentences):
        word_tokens = [tokens_of[word] for word in words]
        # The tag is the target of a word's first token (Devlin et al. 2019, section 5.3).
        word_targets = [
            np.array([tag, *[NO_TAG] * (len(word) - 1)])
            for tag, word in zip(tags[index], word_tokens, strict=True)
        ]
        for begin, end in split_into_rows([len(word) for word in word_tokens], room):
            row = np.concatenate(word_tokens[begin:end])[:room]
            tokens.append(np.concatenate([before, row, after]))
            tags_of_row = np.concatenate(word_targets[begin:end])[:room]
            targets.append(np.pad(tags_of_row, (len(before), len(after)), constant_values=NO_TAG))
            sentence_indices.append(index)
    return TokenLabelSplit(
        RaggedArray.from_sequences(tokens),
        RaggedArray.from_sequences(targets),
        np.array(sentence_indices),
        labels,
    )


def encode_words(
    tokenizer: Tokenizer, words: Iterable[str]
) -> Mapping[str, np.ndarray]:  # each [t] int32
    """Return the tokens of each word with its leading space: at least one, whatever the word is."""
    unique = list(dict.fromkeys(words))
    # A word of which the tokenizer drops every character still needs a token to carry its tag.
    placeholder = np.array([tokenizer.eos_token_id], np.int32)
    encoded = tokenize_examples(tokenizer, unique)
    return {
        word: tokens if len(tokens) else placeholder
        for word, tokens in zip(unique, encoded, strict=True)
    }


def split_into_rows(sizes: Sequence[int], max_length: int) -> Iterator[tuple[int, int]]:
    """Cut a sentence between words of these sizes into rows of at most ``max_length`` tokens.

    A longer word gets a row of its own. Yields the first word of each row, and the one after its
    last.
    """
    begin = length = 0
    for word, size in enumerate(sizes):
        if length + size > max_length and word > begin:
            yield begin, word
            begin, length = word, 0
        length += size
    yield begin, len(sizes)
