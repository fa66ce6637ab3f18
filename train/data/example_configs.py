"""Settings of data with separate examples: labels, tagged words, bitext, ListOps, features."""

import codecs
import dataclasses
from typing import Annotated, Literal

from train.data.data_config import ArrayDataConfig, DataConfig, TokenizerConfig
from train.errors import UsageError
from train.settings import HostSeed
from transformer.validation import Bounds, Mark, NonNegativeInt, PositiveFloat, PositiveInt

ClassificationFormat = Literal["tsv", "label_first"]
TagColumn = Literal["upos", "xpos"]


@dataclasses.dataclass(frozen=True)
class ExampleDataConfig(DataConfig):
    """Fields that all data with separate examples have: paths, splits, lengths, tokenizer.

    A path is a file, a folder or a glob, as of `train.data.data_config.TextDataConfig`. The formats
    are in docs/tasks.md.
    """

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """Training examples. Held-out examples are taken from it unless there are validation files."""

    validation_path: Annotated[str, Mark.RESUMABLE] = ""
    """Validation examples. Empty: those of a folder that has files of this split, or held out of
    path."""

    test_path: Annotated[str, Mark.RESUMABLE] = ""
    """Test examples. Empty: those of a folder that has files of this split, or none."""

    validation_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.1
    """Fraction of the examples of path to hold out if validation_path is empty."""

    split_seed: HostSeed = 0
    """Seed of the choice of held-out examples."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 128
    """Maximum number of tokens of an example."""

    max_buckets: PositiveInt = 8
    """Maximum number of lengths that examples are padded to. Each is a program to compile. 1: pad
    all examples to the longest."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Settings of the tokenizer. It is trained on the training split."""

    @property
    def longest_example(self) -> int:
        return self.max_length


@dataclasses.dataclass(frozen=True)
class ClassificationDataConfig(ExampleDataConfig):
    """Labeled texts: rows of CSV, TSV, JSON or Parquet, or a label and a text a line.

    Columns with usual names (text, sentence, review; label, class, sentiment) are found.
    """

    format: ClassificationFormat = "tsv"
    """Format of plain text. tsv: separated columns. label_first: the first word is the label and
    the rest is the text, as in TREC's question files."""

    label_column: str = "label"
    """Column of the label, by its name or by its number from 0."""

    text_column: str = "text"
    """Column of the text, by its name or by its number from 0."""

    header: bool = True
    """The first line of CSV names the columns. False: the numbers of columns are those of a file
    without names. A first line with usual names is recognized either way."""

    coarse_labels: bool = False
    """Keep only the part of a label before its first colon: DESC of DESC:manner."""

    encoding: str = "utf-8"
    """Encoding of files that are not UTF-8: latin-1, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "tsv" and not self.header:
            for name in ("label_column", "text_column"):
                column = getattr(self, name)
                if not column.isdecimal():
                    raise UsageError(
                        f"data.{name}: {column!r} is not a column number, and there is no header "
                        "to find a name in; give 0 or more, or set data.header"
                    )
        if self.label_column == self.text_column:
            raise UsageError(
                f"data.text_column: column {self.text_column} is the label; give another"
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise UsageError(
                f"data.encoding: {self.encoding!r} is not known; give utf-8 or latin-1, say"
            ) from None


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


def _require_ends_of_turns(tokenizer: TokenizerConfig) -> None:
    """Raise UsageError for tokens that are words: `Yes.<eos>User:` would be one."""
    if tokenizer.kind == "word":
        raise UsageError(
            "data.tokenizer.kind: word cannot tell the end of an answer from its last word; choose "
            "bpe, or file with the tokenizer of a model"
        )


@dataclasses.dataclass(frozen=True)
class ConversationDataConfig(ExampleDataConfig):
    """Conversations in rows, for instruction tuning.

    A row has `messages`, a list of {"role", "content"}; or `prompt` and `completion`, both texts
    or both lists of messages.
    """

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 512
    """Tokens of a row. Longer conversations are cut at their ends; their number is reported."""

    packing: bool = True
    """Put several conversations into a row. None attends to another."""

    chat_template: str = ""
    """File with a Jinja template. Empty: the template of the tokenizer, or a plain default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_ends_of_turns(self.tokenizer)


@dataclasses.dataclass(frozen=True)
class PreferenceDataConfig(ExampleDataConfig):
    """Pairs of answers in JSON lines: `prompt`, `chosen` and `rejected`, texts or messages."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 512
    """Tokens of a row, which holds both sequences of a pair: half of it for each. Longer sequences
    are cut at their ends; their number is reported."""

    chat_template: str = ""
    """File with a Jinja template. Empty: the template of the tokenizer, or a plain default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_ends_of_turns(self.tokenizer)


@dataclasses.dataclass(frozen=True)
class ListOpsDataConfig(ExampleDataConfig):
    """ListOps: nested operations on digits, labeled by their value. ``[MAX 4 [MIN 5 1 ] 2 ]`` is 4.

    Nangia and Bowman 2018, with the lengths of the Long Range Arena (Tay et al. 2021, section
    2.2.1) as defaults. Expressions are generated from a seed, without duplicates; with a path they
    are read from files.
    """

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """File as the arena publishes it, with columns Source and Target; likewise validation_path and
    test_path. Empty: expressions are generated."""

    train_examples: PositiveInt = 96_000
    """Number of training expressions to generate."""

    validation_examples: PositiveInt = 2000
    """Number of validation expressions to generate."""

    test_examples: PositiveInt = 2000
    """Number of test expressions to generate."""

    min_length: NonNegativeInt = 500
    """Generated expressions have more tokens than this. Operators, digits and ] are one token."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 2000
    """Generated expressions have fewer tokens than this, so that they fit with the start token.
    Longer ones in files are truncated."""

    max_depth: Annotated[int, Bounds(2, 500)] = 10
    """Maximum depth of nesting: operators stand at smaller depths, and digits alone at this one."""

    max_arguments: Annotated[int, Bounds(2, 2**16)] = 10
    """Maximum number of arguments of an operator; the minimum is 2."""

    generator_seed: HostSeed = 0
    """Seed of the generated expressions."""

    tokenizer: TokenizerConfig = TokenizerConfig(
        "word", vocab_size=32, training_characters=1_000_000
    )
    """Settings of the tokenizer. The first million characters have all 15 words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both bounds are exclusive: one length has to lie between them.
        if self.max_length - self.min_length < 2:
            raise UsageError(
                f"data.min_length: no expression is longer than {self.min_length} tokens and "
                f"shorter than data.max_length {self.max_length}; give less"
            )
        for name in ("validation_path", "test_path"):
            if getattr(self, name) and not self.path:
                raise UsageError(
                    f"data.{name}: has no effect while expressions are generated; set data.path too"
                )


@dataclasses.dataclass(frozen=True)
class FeatureDataConfig(ArrayDataConfig):
    """Examples of numbers with a label each: images, sound, graphs, or sequences of vectors."""

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """A .npz file with `labels` [examples] and one of `images` [examples, height, width(,
    channels)], `signals` [examples, samples] and `features` [examples, T, numbers]; optionally
    `adjacency` [examples, T, T]. Or a built-in set: builtin:digits, builtin:chirps,
    builtin:graphs."""

    test_path: Annotated[str, Mark.RESUMABLE] = ""
    """Likewise, for the test split. Empty: none, unless the set is built in."""

    patch_size: NonNegativeInt = 0
    """Images: height and width of a patch. Each patch is one position."""

    frame_length: NonNegativeInt = 0
    """Signals: samples of a frame. The spectrum of each frame is one position."""

    frame_step: NonNegativeInt = 0
    """Signals: samples from the start of a frame to the next. 0: half of frame_length."""

    scale: PositiveFloat = 1.0
    """Images and features are divided by this: 255 for pixels of one byte."""
