"""Settings of the data: the interface of all kinds, tokenizers, and running text.

Several sources of running text are in `TextDataConfig.sources` and `TextDataConfig.streaming`.
"""

import abc
import dataclasses
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from train.data.held_data import PYTHON_DATA_PREFIX, held_data
from train.errors import UsageError
from train.settings import Settings
from transformer.validation import Bounds, Mark, NonNegativeInt, PositiveFloat, PositiveInt

TokenizerKind = Literal["byte", "character", "word", "bpe", "wordpiece", "file"]
SplitMethod = Literal["documents", "tail"]

NUM_BYTE_VALUES = 256


FileSize = Annotated[int, Bounds(0, 2**63 - 1)]
"""Bytes or characters of a file."""


@dataclasses.dataclass(frozen=True)
class TokenizerConfig(Settings, part="data.tokenizer"):
    """Settings of the tokenizer. Every kind has one token that separates documents."""

    kind: Annotated[TokenizerKind, Mark.COMMON] = "bpe"
    """byte: the 256 bytes. character: all characters of the text, held-out text included. word:
    words between spaces, and <eos> for a newline. bpe: byte-level byte-pair encoding. wordpiece:
    BERT's. The last three are trained on the training split. file: an existing tokenizer."""

    path: str = ""
    """With kind=file: a tokenizer.json, a vocab.txt (BERT's), a SentencePiece model, or a folder
    that holds one of them or encoder.json (or vocab.json) and merges.txt (GPT-2's)."""

    vocab_size: int = 8192
    """Maximum vocabulary size of word, bpe and wordpiece, special tokens included."""

    lowercase: bool = False
    """Lowercase all text first. Decoded text is then lowercase too."""

    training_characters: Annotated[int, Bounds(1, 2**63 - 1)] = 100_000_000
    """Number of characters, from the start of the training split, that word, bpe and wordpiece
    are trained on."""

    @property
    def is_given(self) -> bool:
        """True if the settings name a tokenizer (a file, or the bytes); others are trained."""
        return self.kind in ("file", "byte")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "file" and not self.path:
            raise UsageError(
                "data.tokenizer.path: is empty; kind=file needs a tokenizer.json, a vocab.txt or a "
                "folder"
            )
        if self.kind == "file" and self.lowercase:
            raise UsageError(
                "data.tokenizer.lowercase: a tokenizer from a file has its own rule; leave it out"
            )
        if self.kind != "file" and self.path:
            raise UsageError(
                f"data.tokenizer.path: {self.path} has no effect; set data.tokenizer.kind to file"
            )
        # BPE starts from the bytes and the separator; word and wordpiece need a few tokens.
        least = NUM_BYTE_VALUES + 1 if self.kind == "bpe" else 8
        if self.vocab_size < least:
            raise UsageError(
                f"data.tokenizer.vocab_size: {self.vocab_size} is too small; {self.kind} needs "
                f"{least} or more"
            )


@dataclasses.dataclass(frozen=True)
class DataConfig(Settings, abc.ABC, part="data"):
    """Interface of the data settings, `Experiment.data`: a frozen dataclass.

    It states the facts about batches that the trainer and the estimates need before any data are
    read, so that neither asks for the class of the settings.

    Attributes:
      length_field: Name of the field that limits the length of an example.
      is_text: Examples are windows of running text, all of one length.
    """

    length_field: ClassVar[str] = "max_length"
    is_text: ClassVar[bool] = False

    @property
    def path(self) -> str:
        """Path of the training data; empty for data that are generated."""
        return ""

    @property
    def tokenizer(self) -> TokenizerConfig | None:
        """Settings of the tokenizer; None for data without text."""
        return None

    def read_split(self, split: str) -> Iterable[Any] | None:
        """Return the examples of a split. For datasets of the user: shipped ones read files.

        A dataset that overrides this derives from the data settings of its task, and reads no
        `path`. Its examples are the same in every call. They are texts for `TextDataConfig`,
        (text, label) for `ClassificationDataConfig`, (source, target) for `BitextDataConfig`, for
        `TokenLabelDataConfig` sentences, each a sequence of (word, tag), and for others the rows of
        their files.

        Args:
          split: "train", "validation" or "test".

        Returns:
          The examples; None if there is no such split. Without a validation split, training
          examples are held out as the settings say.
        """
        if not self.path.startswith(PYTHON_DATA_PREFIX):
            return None
        return held_data(self.path).splits.get(split)

    @property
    def has_own_examples(self) -> bool:
        """True for a dataset that yields its examples itself, and for data given from Python."""
        overrides = type(self).read_split is not DataConfig.read_split
        return overrides or self.path.startswith(PYTHON_DATA_PREFIX)

    @property
    @abc.abstractmethod
    def longest_example(self) -> int:
        """Maximum number of tokens of an example."""

    @property
    def shortest_row(self) -> int:
        """Lower bound of the tokens of a row, padding included. Used by checks of memory."""
        return self.longest_example

    @property
    def has_segments(self) -> bool:
        """True if rows hold several documents or padding, which attention must separate."""
        return True

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens of a batch; 0 if `Experiment.batch_size` alone limits it."""
        return 0

    @property
    def batch_size_multiple(self) -> int:
        """Number that the rows of a batch are a multiple of, where `batch_tokens` is not 0."""
        return 1


@dataclasses.dataclass(frozen=True)
class SourceConfig(Settings, part="data.sources"):
    """One of several sources of running text that are mixed. Paths are as in `TextDataConfig`."""

    path: Annotated[str, Mark.RESUMABLE] = ""
    """Training text. Held-out text is taken from it unless validation_path is set."""

    name: str = ""
    """Name of the source in metrics: letters, digits, and any of . _ -. Empty: the last part of the
    path, without its endings."""

    weight: PositiveFloat = 1.0
    """Share of the training tokens, relative to the weights of the other sources. Positive."""

    validation_path: Annotated[str, Mark.RESUMABLE] = ""
    """Validation text. Empty: held out of path."""

    test_path: Annotated[str, Mark.RESUMABLE] = ""
    """Test text. Empty: no test split of this source."""

    text_field: str = "text"
    """JSON lines and Parquet: name of the field or column that holds a document's text."""

    max_bytes: FileSize = 0
    """Maximum number of bytes of text to read from each path. 0: all of it. Not for streams."""

    max_epochs: Annotated[NonNegativeInt, Mark.RESUMABLE] = 0
    """Passes over the source after which training stops with an error. 0: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w.-]*", self.name):
            raise UsageError(
                f"data.sources.name: {self.name!r} cannot name a metric; give letters, digits and "
                "any of . _ -"
            )
        if not self.text_field:
            raise UsageError("data.sources.text_field: is empty; name the JSON field of the text")


@dataclasses.dataclass(frozen=True)
class StreamingConfig(Settings, part="data.streaming"):
    """Training text that is read while the run trains, never whole."""

    enabled: bool = False
    """Read the training text document by document, tokenize it on the way, and keep none of it on
    disk. For data larger than the disk or the memory. The paths hold JSON lines (also compressed)
    or Parquet, local or remote (also https://)."""

    shuffle_window: PositiveInt = 4096
    """Documents that are read ahead and shuffled. 1: the order of the files."""

    readers: PositiveInt = 1
    """Readers of each source, each with its part of the files and of the rows of a batch. It
    divides the batch size. A host runs the readers of its rows: with as many readers as hosts, each
    file is read by one host. The data do not depend on the number of hosts."""

    validation_documents: PositiveInt = 1000
    """Documents, from the start of the first file, that are held out unless there is a
    validation_path."""


@dataclasses.dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """Running text: the files to read, the held-out part, and the length of windows.

    A path is a file, a folder (every file under it whose name does not begin with a dot), a glob
    such as ``books/**/*.txt``, numbered files (``part-{00..63}.jsonl``), or ``python:library`` (the
    help topics and library source that ship with Python). It may be remote (https://...,
    gs://...); ``~`` and ``$NAME`` are expanded; one that does not exist as given is looked for
    under ``$TRANSFORMER_DATA``, and on Kaggle below ``/kaggle/input``. Of a data folder as on the
    Hugging Face hub (``train-*.parquet``, ``validation-*``, ``test-*``) each split is read.

    Files are UTF-8 text, one document each, or rows with one document each: JSON lines, a JSON
    array, Parquet, Arrow, CSV or TSV. Their content decides, not their names; text may be
    compressed (gzip, zstd, bzip2, xz).
    """

    length_field = "sequence_length"
    is_text = True

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """Training text. Held-out text is taken from it unless there are validation files."""

    validation_path: Annotated[str, Mark.RESUMABLE] = ""
    """Validation text. Empty: that of a folder that has files of this split, or held out of
    path."""

    test_path: Annotated[str, Mark.RESUMABLE] = ""
    """Test text. Empty: that of a folder that has files of this split, or none."""

    sources: tuple[SourceConfig, ...] = ()
    """Several sources, mixed by weight, in place of path, validation_path and test_path."""

    streaming: StreamingConfig = StreamingConfig()
    """Reading of data that are larger than the disk or the memory."""

    text_field: str = "text"
    """Name of the field of a row that holds a document's text."""

    split_method: SplitMethod = "documents"
    """Rule that holds validation text out of path. documents: whole documents, selected by a hash
    of their names. tail: the last characters, even from the middle of a document (also used if path
    has a single document)."""

    validation_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.1
    """Fraction of the characters of path to hold out. For documents: at most this fraction, and
    at least one document."""

    max_bytes: FileSize = 0
    """Maximum number of bytes of text to read from each path. 0: all of it."""

    sequence_length: Annotated[PositiveInt, Mark.COMMON] = 256
    """T, tokens per window."""

    document_masking: bool = True
    """Mask documents in one window from each other, and restart positions at each document.
    False: a window is one stream of tokens, separators included."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Settings of the tokenizer."""

    cache_dir: Annotated[str, Mark.RESUMABLE] = ""
    """Local folder for encoded text. Empty: $TRANSFORMER_CACHE, or else linen-transformer under
    $XDG_CACHE_HOME or ~/.cache."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text_field:
            raise UsageError("data.text_field: is empty; name the JSON field of the text")

    @property
    def longest_example(self) -> int:
        return self.sequence_length

    @property
    def has_segments(self) -> bool:
        return self.document_masking

    @property
    def is_mixed(self) -> bool:
        """True for several sources, and for streams."""
        return bool(self.sources) or self.streaming.enabled
