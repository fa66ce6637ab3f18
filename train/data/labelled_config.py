"""The data settings of classification. Imports nothing heavy."""

import codecs
import dataclasses
from typing import Literal

from train.data.config import require, require_one_of
from train.data.example_config import ExampleDataConfig

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
        for name in ("label", "text") if self.format == "tsv" and not self.header else ():
            column = getattr(self, name)
            require(
                column.isdecimal(),
                f"data.{name}: {column!r} is no number, and there is no header that could name a "
                "column; give 0 or more, or set data.header",
            )
        require(
            self.label_column != self.text_column,
            f"data.text: column {self.text_column} is the label; give another",
        )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            require(
                False, f"data.encoding: {self.encoding!r} is not known; give utf-8 or latin-1, say"
            )
