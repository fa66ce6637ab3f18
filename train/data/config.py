"""What the data settings are. Imports nothing heavy: the command line reads this for ``--help``."""

import dataclasses
from typing import Literal, get_args

from train.errors import UsageError

TokenizerKind = Literal["byte", "character", "word", "bpe", "wordpiece", "file"]


SplitMethod = Literal["documents", "tail"]


NUM_BYTE_VALUES = 256


def require(condition: bool, message: str) -> None:
    """Raises UsageError with ``message`` ("field: problem; remedy") unless ``condition``."""
    if not condition:
        raise UsageError(message)


def require_one_of(name: str, value: str, choices: object) -> None:
    """Raises UsageError unless ``value`` is one of the values of a Literal, ``choices``."""
    known = get_args(choices)
    require(value in known, f"{name}: {value!r} is not known; choose from {', '.join(known)}")


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens. Every kind has one token that stands between documents."""

    kind: TokenizerKind = "bpe"
    """byte: the 256 bytes. character: all characters of the text, held out or not. word: what
    stands between spaces, and <eos> for a newline. bpe: byte-level byte-pair encoding.
    wordpiece: BERT's. The last three learn from the training split. file: one that exists."""

    path: str = ""
    """With kind=file: a tokenizer.json, a vocab.txt (BERT's), or a folder that holds one of them
    or encoder.json (or vocab.json) and merges.txt (GPT-2's)."""

    vocab_size: int = 8192
    """Most tokens that word, bpe or wordpiece learn, the special ones included."""

    lowercase: bool = False
    """Lower the case of all text first (what is decoded is then lower case too)."""

    training_characters: int = 100_000_000
    """Learn word, bpe or wordpiece from the first this many characters of the training split."""

    def __post_init__(self) -> None:
        name = "data.tokenizer"
        require_one_of(f"{name}.kind", self.kind, TokenizerKind)
        if self.kind == "file":
            require(
                bool(self.path),
                f"{name}.path: is empty; kind=file needs a tokenizer.json, a vocab.txt or a folder",
            )
            require(
                not self.lowercase,
                f"{name}.lowercase: a tokenizer from a file has its own rule; leave it out",
            )
        else:
            require(
                not self.path,
                f"{name}.path: {self.path} would not be read; set {name}.kind to file",
            )
        least = NUM_BYTE_VALUES + 1 if self.kind == "bpe" else 8
        require(
            self.vocab_size >= least,
            f"{name}.vocab_size: {self.vocab_size} is too small; {self.kind} needs {least} or more",
        )
        require(
            self.training_characters > 0,
            f"{name}.training_characters: {self.training_characters} leaves nothing to learn from; "
            "give a positive number",
        )


@dataclasses.dataclass(frozen=True)
class TextDataConfig:
    """Which text is read, what is held out of it, and how it is cut into windows.

    A path is a file, a folder (every file under it whose name does not begin with a dot), a glob
    such as ``books/**/*.txt``, or ``python:library`` (the help topics and library source that
    every Python carries). It may be remote (gs://...); ``~`` and ``$NAME`` are expanded; one that
    does not exist as given is looked for under ``$TRANSFORMER_DATA``. Files are UTF-8 text, one
    document each, or JSON lines (.jsonl, .ndjson), one document a line; either may be gzip (.gz).
    """

    path: str = ""
    """The text to train on, less what is held out of it."""

    validation_path: str = ""
    """The validation text. Empty: it is held out of path."""

    test_path: str = ""
    """The test text. Empty: there is no test split."""

    text_field: str = "text"
    """JSON lines: the field that holds a document's text."""

    split_method: SplitMethod = "documents"
    """How validation text is held out of path. documents: whole documents, drawn by a hash of
    their names. tail: the last characters, be they in the middle of a document (and so it is for
    a path of one document)."""

    validation_fraction: float = 0.1
    """The part of the characters of path that is held out: for documents, at most this and at
    least one document."""

    max_bytes: int = 0
    """Read only the first this many bytes of the text of each path; 0 reads all."""

    sequence_length: int = 256
    """Tokens in a window, T."""

    document_masking: bool = True
    """Documents that share a window do not attend to each other, and positions start anew at
    each. False: a window is one run of tokens, separators included."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""

    cache_dir: str = ""
    """A local folder for encoded text. Empty: $TRANSFORMER_CACHE, or else
    linen-transformer under $XDG_CACHE_HOME or ~/.cache."""

    def __post_init__(self) -> None:
        require_one_of("data.split_method", self.split_method, SplitMethod)
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction: {self.validation_fraction} is not a part of the text; "
            "give a number between 0 and 1",
        )
        require(
            self.sequence_length >= 1,
            f"data.sequence_length: {self.sequence_length} is no window; give 1 or more",
        )
        require(
            self.max_bytes >= 0,
            f"data.max_bytes: {self.max_bytes} is negative; give 0 to read all",
        )
        require(
            bool(self.text_field),
            "data.text_field: is empty; name the JSON field that has the text",
        )
