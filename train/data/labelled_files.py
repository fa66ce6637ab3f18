"""Files of texts with their labels: tab-separated columns, or the label as the first word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from train.data.example_corpus import preview_names
from train.data.files import find_file
from train.data.labelled_config import ClassificationDataConfig
from train.data.lines import line_location, read_lines
from train.errors import UserError


class LabeledText(NamedTuple):
    """A text, the name of its class, and what messages call the line that it is from."""

    label: str
    text: str
    location: str


def read_labeled_texts(
    config: ClassificationDataConfig, setting: str, path: str
) -> Iterator[LabeledText]:
    """The texts of a file, one for each line that is not empty."""
    file = find_file(path, setting)
    lines = read_lines(file, config.encoding)
    columns = _columns(config, lines[0], line_location(file, 0)) if config.format == "tsv" else None
    skip = 1 if config.format == "tsv" and config.header else 0
    for index, line in enumerate(lines[skip:], start=skip):
        if line.strip():
            where = line_location(file, index)
            label, text = _by_columns(line, columns, where) if columns else _first_word(line, where)
            if not label:
                raise UserError(f"{where}: its label is empty; mend the line, or leave it out")
            yield LabeledText(
                label.partition(":")[0] if config.coarse_labels else label, text, where
            )


def _columns(config: ClassificationDataConfig, first: str, where: str) -> tuple[int, int]:
    """The numbers of the columns of label and text."""
    if not config.header:
        return int(config.label_column), int(config.text_column)
    names = first.split("\t")
    found = []
    for setting, column in (("label", config.label_column), ("text", config.text_column)):
        if column in names:
            found.append(names.index(column))
        elif column.isdecimal():
            found.append(int(column))
        else:
            raise UserError(
                f"{where}: the header has no column {column!r} (it has {preview_names(names)}); set "
                f"data.{setting}, or data.header to False if this line is an example"
            )
    return found[0], found[1]


def _by_columns(line: str, columns: tuple[int, int], where: str) -> tuple[str, str]:
    cells = line.split("\t")
    if max(columns) >= len(cells):
        raise UserError(
            f"{where}: has {len(cells)} columns, but data.label and data.text ask for column "
            f"{max(columns)}, from 0 on; mend the line or these settings (a tab stands between "
            "columns)"
        )
    return cells[columns[0]].strip(), cells[columns[1]]


def _first_word(line: str, where: str) -> tuple[str, str]:
    label, _, text = line.strip().partition(" ")
    if not text:
        raise UserError(f"{where}: has one word only; it should have a label and then a text")
    return label, text
