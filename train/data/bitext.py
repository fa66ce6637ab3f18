"""Bitext: sentence pairs of two languages, for encoder-decoders."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from train.data.batches import example_ids
from train.data.buckets import RaggedArray
from train.data.chat_template import end_tokens
from train.data.data_config import TokenizerConfig
from train.data.examples import (
    ExampleCorpus,
    ExampleDataConfig,
    ExampleSplits,
    check_text_pair,
    encode_splits,
    preview_names,
    read_splits,
    tokenize_examples,
    tokenizer_for_splits,
)
from train.data.files import SPLITS, Notes, TextFile, find_optional_file, find_splits
from train.data.rows import FORMATS_PAGE, line_location, located_rows, plain_name
from train.data.text_files import read_lines
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError, as_user_error
from train.files import HTTP_SCHEMES
from transformer.validation import Bounds, Mark, NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True)
class BitextDataConfig(ExampleDataConfig):
    """Sentences and their translations: two files with equal numbers of lines, or rows of both.

    A path is the common prefix of two file names: ``multi30k/raw/train`` with source_lang "en" and
    target_lang "de" reads ``multi30k/raw/train.en`` and ``multi30k/raw/train.de``, or those files
    with .gz after their names. Or it is a file or folder of rows: two columns of TSV or CSV, or
    JSON or Parquet with the fields "en" and "de". Both languages share one tokenizer, trained on
    both.
    """

    source_lang: str = "en"
    """Ending of the file, or name of the column, in the source language."""

    target_lang: str = "de"
    """Ending of the file, or name of the column, in the target language. BLEU takes it as the
    language's code."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 128
    """Maximum number of tokens of a sentence, its end token included. Longer pairs are removed
    from the training split and truncated in the others. Their number is reported."""

    batch_tokens: NonNegativeInt = 0
    """Maximum number of tokens of a batch: its rows times the longer of its two sides, padding
    included. Batches of shorter pairs have more rows, up to batch_size (0: no such limit). 0: every
    batch has batch_size pairs, of any length."""

    batch_size_multiple: PositiveInt = 8
    """With batch_tokens, rows of a batch are a multiple of this, so that they divide among devices
    and microbatches. It is a setting, and not derived from them, because the order of the data must
    not depend on the hardware."""

    tokenizer: TokenizerConfig = TokenizerConfig("bpe", vocab_size=10_000, lowercase=True)
    """Settings of the tokenizer of both languages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_lang", "target_lang"):
            if not getattr(self, name):
                raise UsageError(f"data.{name}: is empty; give a file ending such as en")
        if self.source_lang == self.target_lang:
            raise UsageError(
                f"data.target_lang: {self.target_lang} is also data.source_lang; give the ending "
                "of the other files"
            )

    @property
    def shortest_row(self) -> int:
        return 1


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclasses.dataclass(frozen=True, eq=False)
class BitextSplit:
    """Tokenized sentence pairs of a split. Each sentence ends with the end-of-text token."""

    pairs: Sequence[SentencePair]
    source: RaggedArray
    target: RaggedArray
    decoder_start_token_id: int
    """First token that the decoder reads."""

    @property
    def lengths(self) -> np.ndarray:  # [n, 2]
        """Number of tokens of source and target."""
        return np.stack([self.source.lengths, self.target.lengths], axis=1)

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some pairs, padded to S and T tokens.

        Returns:
          source, source_segments: [B, S] int32, the tokens, and 1 where they are not padding.
          tokens, targets: [B, T] int32, the decoder's inputs and targets.
          segments: [B, T] int32, 1 where these are not padding.
          weights: [B, T] float32, the same.
          examples: [B] uint32, the indices of the pairs within the split.
        """
        source, source_real = self.source.pad(indices, lengths[0])
        targets, real = self.target.pad(indices, lengths[1])
        # Teacher forcing: the decoder reads the targets shifted right by one position.
        tokens = np.concatenate(
            [np.full_like(targets[:, :1], self.decoder_start_token_id), targets[:, :-1]], axis=1
        )
        return {
            "source": source,
            "source_segments": source_real.astype(np.int32),
            "tokens": np.where(real, tokens, 0),
            "targets": targets,
            "segments": real.astype(np.int32),
            "weights": real.astype(np.float32),
            "examples": example_ids(np.maximum(indices, 0)),
        }


def prepare_bitext(
    config: BitextDataConfig,
    tokenizer: Tokenizer | None = None,
    start_token: str = "",
    source_language: str = "",
    target_language: str = "",
) -> ExampleCorpus[BitextSplit]:
    """Read and tokenize the pairs that ``config`` names.

    A `tokenizer` takes the place of the one that `config.tokenizer` describes. Start token and
    languages are those of `target_frame` and `source_frame`.

    Raises:
      UserError: A file is missing, empty or not UTF-8, or two files differ in length.
    """
    splits = read_sentence_pairs(config)
    used = tokenizer or tokenizer_for_splits(
        config.tokenizer,
        {
            split: (f" {text.strip()}" for pair in pairs for text in pair)
            for split, pairs in splits.items()
        },
    )
    source = source_frame(used, source_language)
    target = target_frame(used, start_token, target_language)
    return encode_splits(
        splits,
        used,
        lambda split, pairs: _encode(
            split, pairs, used, source, target, config.max_length, splits.notes
        ),
        content=lambda pair: pair,
    )


_SOURCES = ("source", "src", "source_text", "input")
_TARGETS = ("target", "tgt", "target_text", "output", "translation")


def read_sentence_pairs(config: BitextDataConfig) -> ExampleSplits[SentencePair]:
    """Return the pairs of every split: of two files, or of two columns of a file."""
    languages = (config.source_lang, config.target_lang)

    def two_files(start: str) -> list[TextFile]:
        if start.startswith(HTTP_SCHEMES):  # an address is that of one file
            return []
        with as_user_error(start):
            files = [find_optional_file(f"{start}.{ending}") for ending in languages]
        return [file for file in files if file is not None]

    def find(path: str, setting: str, notes: Notes) -> Mapping[str, Sequence[TextFile]]:
        if len(found := two_files(path)) == 2:
            return {"train": found}
        if found or path.endswith(tuple(f".{language}" for language in languages)):
            raise UserError(
                f"{setting} {path}: names one of two files, .{languages[0]} and .{languages[1]}; "
                "give the common start of their names, or a file with two columns "
                f"({FORMATS_PAGE}#sentence-pairs)"
            )
        names = {"train": ("train",), "validation": ("validation", "valid", "val", "dev")}
        in_folder = {
            split: pair
            for split in SPLITS
            for name in names.get(split, (split,))
            if len(pair := two_files(f"{path}/{name}")) == 2
        }
        return in_folder if "train" in in_folder else find_splits(path, setting, notes)

    def read(files: Sequence[TextFile], notes: Notes) -> Iterator[tuple[str, Any]]:
        if [plain_name(file).rpartition(".")[2] for file in files] == [*languages]:
            yield from _lines_of_two_files(files)
            return
        for file in files:
            rows = located_rows(
                file, text="cells", is_header=lambda cells: None not in find_sides(cells, config)
            )
            for number, (location, row) in enumerate(rows):
                if not number and isinstance(row, Mapping) and "2" in row:
                    notes.add(file.path, f"has {len(row)} columns; the first two are read")
                yield location, row

    return read_splits(
        config,
        lambda location, row: parse_sentence_pair(location, row, config),
        lambda location, pair: SentencePair(*check_text_pair(location, pair)),
        read=read,
        find=find,
    )


def _lines_of_two_files(files: Sequence[TextFile]) -> Iterator[tuple[str, Any]]:
    sources, targets = map(read_lines, files)
    if len(sources) != len(targets):
        raise UserError(
            f"{files[1].path}: has {len(targets)} lines, but {files[0].path} has {len(sources)}; "
            "each line must be the translation of the same line there"
        )
    for index, pair in enumerate(zip(sources, targets, strict=True)):
        yield line_location(files[0], index), dict(zip(("source", "target"), pair, strict=True))


def find_sides(names: Iterable[str], config: BitextDataConfig) -> tuple[str | None, str | None]:
    """Return the names of the columns of source and target; None for one that is not there."""
    known = {name.strip().lower(): name for name in names}
    sides = ((config.source_lang, *_SOURCES, "0"), (config.target_lang, *_TARGETS, "1"))
    source, target = (next((known[name] for name in side if name in known), None) for side in sides)
    return source, target


def parse_sentence_pair(location: str, row: Any, config: BitextDataConfig) -> SentencePair | None:
    """Return the pair of a row; None if a side of it is null.

    Raises:
      UserError: It has no such columns, or they hold something else.
    """
    if isinstance(row, Mapping) and isinstance(row.get("translation"), Mapping):
        row = row["translation"]
    source, target = find_sides(row, config) if isinstance(row, Mapping) else (None, None)
    if source is None or target is None:
        names = [*row] if isinstance(row, Mapping) else ["0"]
        has = "one text" if names == ["0"] else ", ".join(names)[:200]
        raise UserError(
            f"{location}: has no sentences in {config.source_lang!r} and {config.target_lang!r} "
            f"(it has {has}); set data.source_lang and data.target_lang "
            f"({FORMATS_PAGE}#sentence-pairs)"
        )
    pair = SentencePair(row[source], row[target])
    if None in pair:
        return None
    return SentencePair(*check_text_pair(location, pair))


def find_start_token(tokenizer: Tokenizer, name: str) -> int:
    """Return the token that a decoder reads first: `name`, or by default that of the model's files.

    Raises UserError for a name that is not a token.
    """
    if name and name not in tokenizer.vocabulary:
        raise UserError(
            f"task.start_token {name}: is not a token of the tokenizer; leave it empty for the "
            "model's own, or the one that ends a text"
        )
    return tokenizer.vocabulary[name] if name else tokenizer.decoder_start_token_id


class SentenceFrame(NamedTuple):
    """Tokens around the sentences of one side."""

    before: np.ndarray  # [n] int32
    after: np.ndarray  # [m] int32
    start: int = -1
    """Token that a decoder reads first."""
    forced: int | None = None
    """First of `before`, which a decoder writes whatever it predicts."""


def source_frame(tokenizer: Tokenizer, language: str = "") -> SentenceFrame:
    """Return the tokens around a source: the end-of-text token after it.

    What a published tokenizer puts around a text, such as BART's <s> and </s>, takes its place.
    Tokens of a language among them become that of `language`, if one is given by its code.

    Raises:
      UserError: The tokenizer has no such language.
    """
    return _frame_of_language(tokenizer, _language_token(tokenizer, "source", language))


def target_frame(tokenizer: Tokenizer, start_token: str = "", language: str = "") -> SentenceFrame:
    """Return the tokens around a target, and those that a decoder begins with.

    A language is given by its code. Its token is the one that the decoder reads first where the
    model's files name a language there, as those of mBART do, and else the first that it writes.

    Raises:
      UserError: The tokenizer has no such start token or language.
    """
    start, forced = find_start_token(tokenizer, start_token), tokenizer.forced_bos_token_id
    languages = {*tokenizer.language_token_ids.values()}
    token = _language_token(tokenizer, "target", language)
    if token is None:
        token = next((each for each in (forced, start) if each in languages), None)
    elif start in languages:
        start = token
    else:
        forced = token
    frame = _frame_of_language(tokenizer, token)
    if forced is not None and forced not in frame.before:
        frame = frame._replace(before=np.array([forced], np.int32))
    return frame._replace(start=start, forced=forced)


def _language_token(tokenizer: Tokenizer, side: str, code: str) -> int | None:
    """Return the token of a language, None for an empty code."""
    known = tokenizer.language_token_ids
    if code and code not in known:
        codes = f"give one of {preview_names(sorted(known))}" if known else "leave it out"
        raise UserError(
            f"{side}_language {code}: is not a language that the tokenizer has a token for; {codes}"
        )
    return known[code] if code else None


def _frame_of_language(tokenizer: Tokenizer, language: int | None) -> SentenceFrame:
    before, after = tokenizer.added_token_ids
    after = after if len(after) else np.array([tokenizer.eos_token_id], np.int32)
    if language is None:
        return SentenceFrame(before, after)
    languages = [*tokenizer.language_token_ids.values()]
    before, after = (np.where(np.isin(each, languages), language, each) for each in (before, after))
    return SentenceFrame(before, after)


def encode_sentences(
    tokenizer: Tokenizer, texts: Iterable[str], frame: SentenceFrame | None = None
) -> list[np.ndarray]:  # each [T] int32
    """Return the tokens of sentences in their frame; None: that of a source."""
    frame = frame or source_frame(tokenizer)
    return [
        np.concatenate([frame.before, tokens, frame.after]).astype(np.int32)
        for tokens in tokenize_examples(tokenizer, texts)
    ]


def sentence_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a sentence: also a separator that is a line end in other texts."""
    return tuple(dict.fromkeys([*end_tokens(tokenizer), tokenizer.eos_token_id]))


def decode_sentence(
    tokenizer: Tokenizer,
    tokens: np.ndarray,  # [T]
) -> str:
    """Return the text of a decoder's output, up to the first token that ends a text."""
    ends = np.flatnonzero(np.isin(tokens, sentence_ends(tokenizer)))
    return tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens).strip()


def _encode(
    name: str,
    pairs: Sequence[SentencePair],
    tokenizer: Tokenizer,
    source_frame: SentenceFrame,
    target_frame: SentenceFrame,
    max_length: int,
    notes: list[str],
) -> BitextSplit:
    """Tokenize a split. Notes on removed and truncated pairs are appended to ``notes``."""
    sides = [
        encode_sentences(tokenizer, [pair[side] for pair in pairs], frame)
        for side, frame in enumerate((source_frame, target_frame))
    ]
    lengths = np.array([[len(tokens) for tokens in side] for side in sides])  # [2, n]
    unsuitable = (lengths > max_length).any(axis=0)  # [n]
    if name == "train":
        # Pairs with an empty side teach nothing. Other splits keep every pair, so that their scores
        # are comparable with published ones.
        unsuitable |= np.array([not all(map(str.strip, pair)) for pair in pairs])
        indices = np.flatnonzero(~unsuitable).tolist()
        if not indices:
            raise UserError(
                f"the train split: all its pairs are longer than data.max_length {max_length} "
                "tokens or have an empty side; raise it, or give other text"
            )
        pairs = [pairs[index] for index in indices]
        sides = [[side[index] for index in indices] for side in sides]
    if unsuitable.any():
        problem = "or have an empty side: they are left out" if name == "train" else "and are cut"
        notes.append(
            f"the {name} split: {unsuitable.sum():,} of {unsuitable.size:,} pairs are longer than "
            f"data.max_length {max_length} tokens {problem}"
        )
    source, target = (
        RaggedArray.from_sequences([_truncate(tokens, max_length) for tokens in side])
        for side in sides
    )
    return BitextSplit(pairs, source, target, target_frame.start)


def _truncate(tokens: np.ndarray, max_length: int) -> np.ndarray:
    """Return the tokens, truncated to ``max_length`` with the end token kept."""
    if len(tokens) <= max_length:
        return tokens
    return np.append(tokens[: max_length - 1], tokens[-1:])
