"""The data settings of tagging. Imports nothing heavy."""

import dataclasses
from typing import Literal

from train.data.config import require_one_of
from train.data.example_config import ExampleDataConfig

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
        require_one_of("data.tag", self.tag_column, TagColumn)
