"""Files of sentences whose words have tags: CoNLL-U, and the columns of older shared tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from train.data.files import TextFile, find_file
from train.data.lines import line_location, read_lines
from train.data.tagged_config import TokenLabelDataConfig
from train.errors import UserError

CONLLU_COLUMNS = 10
_UPOS = 3
_NEITHER_WORD = re.compile(r"\d+-\d+|\d+\.\d+")
_DOCUMENT_START = "-DOCSTART-"


class TaggedWord(NamedTuple):
    """A word, its tag, and the line that it is from, counted from 0."""

    text: str
    tag: str
    line: int


class TaggedSentence(NamedTuple):
    """Some words, and the file that they are from."""

    words: Sequence[TaggedWord]
    file: TextFile

    def tag_locations(self) -> Iterator[tuple[str, str]]:
        """Each tag, and what messages call its line."""
        return ((word.tag, line_location(self.file, word.line)) for word in self.words)


def read_sentences(config: TokenLabelDataConfig, setting: str, path: str) -> list[TaggedSentence]:
    """The sentences of a file (UserError: it is missing, or a line is not as it should be)."""
    file = find_file(path, setting)
    read = _columns_word if config.format == "columns" else _conllu_word(config)
    sentences: list[list[TaggedWord]] = [[]]
    for index, line in enumerate(read_lines(file)):
        if not line.strip():
            sentences.append([])
        elif found := read(line, line_location(file, index)):
            sentences[-1].append(TaggedWord(*found, index))
    return [TaggedSentence(words, file) for words in sentences if words]


def _columns_word(line: str, where: str) -> tuple[str, str] | None:
    """The first column and the last."""
    cells = line.split()
    if cells[0] == _DOCUMENT_START:
        return None
    if len(cells) < 2:
        raise UserError(
            f"{where}: has one column only; a word must be the first and its tag the last"
        )
    return cells[0], cells[-1]


def _conllu_word(config: TokenLabelDataConfig) -> Callable[[str, str], tuple[str, str] | None]:
    """A reader of CoNLL-U's lines (universaldependencies.org/format.html).

    Comments are no words, nor are the surface forms of several words (3-4), of which each comes on
    its own line, nor words that the text leaves out (8.1).
    """
    column = _UPOS + (config.tag_column == "xpos")

    def word(line: str, where: str) -> tuple[str, str] | None:
        if line.startswith("#"):
            return None
        cells = line.split("\t")
        if len(cells) != CONLLU_COLUMNS:
            raise UserError(
                f"{where}: has {len(cells)} columns, not the {CONLLU_COLUMNS} of CoNLL-U; mend it, "
                "or set data.format to columns"
            )
        if _NEITHER_WORD.fullmatch(cells[0]):
            return None
        if not cells[0].isdecimal():
            raise UserError(f"{where}: {cells[0]!r} is no word's number; mend it")
        if cells[column] == "_":
            raise UserError(
                f"{where}: word {cells[1]!r} has no {config.tag_column}; tag it, or set data.tag to other "
                "tags that the file has"
            )
        return cells[1], cells[column]

    return word
