"""What the data settings of tasks with separate examples have in common. Imports nothing heavy.

The data settings of classification. Imports nothing heavy.

The data settings of translation. Imports nothing heavy.

The data settings of tagging. Imports nothing heavy.

The data settings of ListOps. Imports nothing heavy.
"""

import codecs
import dataclasses
from typing import Literal

from train.data.config import TokenizerConfig, require, require_one_of


@dataclasses.dataclass(frozen=True)
class ExampleDataConfig:
    """Which examples are read, what is held out of them, and how their text becomes tokens.

    A path may be remote (gs://...); ``~`` and ``$NAME`` are expanded; one that does not exist as
    given is looked for under ``$TRANSFORMER_DATA``. Files are UTF-8 text, gzip if they end in .gz.
    """

    path: str = ""
    """The examples to train on, less what is held out of them."""

    validation_path: str = ""
    """The validation examples. Empty: they are held out of path."""

    test_path: str = ""
    """The test examples. Empty: there is no test split."""

    validation_fraction: float = 0.1
    """The part of the examples of path that is held out, if there is no validation_path."""

    split_seed: int = 0
    """Decides which examples are held out."""

    max_length: int = 128
    """The most tokens of an example that the model is shown."""

    max_buckets: int = 8
    """Examples are padded to at most so many lengths, each of which is a program to be compiled; 1:
    all to that of the longest."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens. What is learned is learned from the training split."""

    def __post_init__(self) -> None:
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction: {self.validation_fraction} is not a part of the examples; "
            "give a number between 0 and 1",
        )
        require(
            self.split_seed >= 0,
            f"data.split_seed: {self.split_seed} is negative; give 0 or more",
        )
        require(
            self.max_length >= 2, f"data.max_length: {self.max_length} is too short; give 2 or more"
        )
        require(
            self.max_buckets >= 1, f"data.max_buckets: {self.max_buckets} is none; give 1 or more"
        )


ClassificationFormat = Literal["tsv", "label_first"]


@dataclasses.dataclass(frozen=True)
class ClassificationDataConfig(ExampleDataConfig):
    """Texts, each with the class that it belongs to: one example a line."""

    format: ClassificationFormat = "tsv"
    """tsv: columns with tabs between them, without quotes. label_first: the first word is the
    label and the rest is the text, as TREC's questions are."""

    label_column: str = "label"
    """tsv: the column of the label, by its name in the header or by its number from 0 on."""

    text_column: str = "text"
    """tsv: the column of the text, likewise."""

    header: bool = True
    """tsv: the first line names the columns. False: columns have numbers alone."""

    coarse_labels: bool = False
    """Take only what stands before the first colon of a label: DESC of DESC:manner."""

    encoding: str = "utf-8"
    """How files are encoded: utf-8, latin-1, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("data.format", self.format, ClassificationFormat)
        for name in (
            ("label_column", "text_column") if self.format == "tsv" and not self.header else ()
        ):
            column = getattr(self, name)
            require(
                column.isdecimal(),
                f"data.{name}: {column!r} is no number, and there is no header that could name a "
                "column; give 0 or more, or set data.header",
            )
        require(
            self.label_column != self.text_column,
            f"data.text_column: column {self.text_column} is the label; give another",
        )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            require(
                False, f"data.encoding: {self.encoding!r} is not known; give utf-8 or latin-1, say"
            )


@dataclasses.dataclass(frozen=True)
class BitextDataConfig(ExampleDataConfig):
    """Sentences and their translations: two files with as many lines, in the same order.

    A path is what the names of both files begin with: ``multi30k/raw/train`` with source "en" and
    target "de" reads ``multi30k/raw/train.en`` and ``multi30k/raw/train.de``, or those files with
    .gz after their names. Both languages share one tokenizer, learned from both.
    """

    source_lang: str = "en"
    """How the name of a file in the source language ends."""

    target_lang: str = "de"
    """How the name of a file in the target language ends. It is taken as the language's code when
    translations are scored."""

    max_length: int = 128
    """The most tokens of a sentence, its end included. Longer pairs are left out of the training
    split; elsewhere they are cut. How many is reported."""

    batch_tokens: int = 0
    """The most tokens in a batch: its rows times the longer of its two sides, padding included. So
    a batch has more of the shorter pairs, up to batch_size (0: no such limit). 0: every batch has
    batch_size pairs, however long they are."""

    batch_size_multiple: int = 8
    """With batch_tokens, rows of a batch are a multiple of this, so that they divide among devices
    and microbatches. A setting, and not what there is of them: the order of the data must not
    depend on that."""

    tokenizer: TokenizerConfig = TokenizerConfig("bpe", vocab_size=10_000, lowercase=True)
    """How text becomes tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_lang", "target_lang"):
            require(bool(getattr(self, name)), f"data.{name}: is empty; give en, say")
        require(
            self.source_lang != self.target_lang,
            f"data.target_lang: {self.target_lang} is the source too; give the ending of the other files",
        )
        require(
            self.batch_tokens >= 0,
            f"data.batch_tokens: {self.batch_tokens} is negative; give 0 for none, or more",
        )
        require(
            self.batch_size_multiple >= 1,
            f"data.batch_size_multiple: {self.batch_size_multiple} is no number of rows; give 1 or more",
        )


TokenLabelFormat = Literal["conllu", "columns"]


TagColumn = Literal["upos", "xpos"]


@dataclasses.dataclass(frozen=True)
class TokenLabelDataConfig(ExampleDataConfig):
    """Sentences whose words have tags: one word a line, and an empty line after each sentence."""

    format: TokenLabelFormat = "conllu"
    """conllu: ten columns with tabs between them (Universal Dependencies). columns: the word first
    and the tag last, with white space between (CoNLL 2000, 2002, 2003)."""

    tag_column: TagColumn = "upos"
    """conllu: which tags, the universal ones or the language's own."""

    max_length: int = 128
    """The most tokens in a row. A longer sentence is cut between words into several rows, so that
    no word is lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("data.format", self.format, TokenLabelFormat)
        require_one_of("data.tag_column", self.tag_column, TagColumn)


@dataclasses.dataclass(frozen=True)
class ListOpsDataConfig(ExampleDataConfig):
    """Nested operations on digits, of which the value is told: ``[MAX 4 [MED 5 1 7 ] 2 ]`` is 5.

    Nangia and Bowman 2018, at the lengths of the Long Range Arena (Tay et al. 2021, section
    2.2.1), which the defaults are. Expressions are drawn from a seed, no two alike; with a path
    they are read from files.
    """

    path: str = ""
    """A file as the arena publishes them, with columns Source and Target; validation_path and
    test_path likewise. Empty: expressions are drawn."""

    train_examples: int = 96_000
    """How many are drawn to train on."""

    validation_examples: int = 2000
    """How many are drawn to validate on."""

    test_examples: int = 2000
    """How many are drawn to test on."""

    min_length: int = 500
    """Expressions drawn have more tokens than this. Operators, digits and ] are one token each."""

    max_length: int = 2000
    """Expressions drawn have fewer tokens than this: with the one put before them, at most so many.
    Longer ones in files are cut."""

    max_depth: int = 10
    """Operators stand within fewer others than this less one: at this depth there are digits."""

    max_arguments: int = 10
    """An operator has 2 to so many arguments."""

    generator_seed: int = 0
    """Decides what is drawn."""

    tokenizer: TokenizerConfig = TokenizerConfig(
        "word", vocab_size=32, training_characters=1_000_000
    )
    """How text becomes tokens. The first million characters have all 15 words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("train_examples", 1),
            ("validation_examples", 1),
            ("test_examples", 1),
            ("min_length", 0),
            ("max_depth", 2),
            ("max_arguments", 2),
            ("generator_seed", 0),
        ):
            value = getattr(self, name)
            require(value >= least, f"data.{name}: {value} is too little; give {least} or more")
        require(
            self.max_length - self.min_length >= 2,
            f"data.min_length: no expression has more than {self.min_length} tokens and fewer than "
            f"data.max_length {self.max_length}; give less",
        )
        for name in () if self.path else ("validation_path", "test_path"):
            require(
                not getattr(self, name),
                f"data.{name}: would not be read, as expressions are drawn; set data.path too",
            )
