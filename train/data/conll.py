"""Files of sentences whose words have tags: CoNLL-U, and the columns of older shared tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from train.data.files import TextFile, find_file
from train.data.lines import place, read_lines
from train.data.tagged_config import TaggedDataConfig
from train.errors import UserError

CONLLU_COLUMNS = 10
_UPOS = 3
_NEITHER_WORD = re.compile(r"\d+-\d+|\d+\.\d+")
_DOCUMENT_START = "-DOCSTART-"


class Word(NamedTuple):
    """A word, its tag, and the line that it is from, counted from 0."""

    text: str
    tag: str
    line: int


class Sentence(NamedTuple):
    """Some words, and the file that they are from."""

    words: Sequence[Word]
    file: TextFile

    def places(self) -> Iterator[tuple[str, str]]:
        """Each tag, and what messages call its line."""
        return ((word.tag, place(self.file, word.line)) for word in self.words)


def read_sentences(config: TaggedDataConfig, setting: str, path: str) -> list[Sentence]:
    """The sentences of a file (UserError: it is missing, or a line is not as it should be)."""
    file = find_file(path, setting)
    read = _columns_word if config.format == "columns" else _conllu_word(config)
    sentences: list[list[Word]] = [[]]
    for index, line in enumerate(read_lines(file)):
        if not line.strip():
            sentences.append([])
        elif found := read(line, place(file, index)):
            sentences[-1].append(Word(*found, index))
    return [Sentence(words, file) for words in sentences if words]


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


def _conllu_word(config: TaggedDataConfig) -> Callable[[str, str], tuple[str, str] | None]:
    """A reader of CoNLL-U's lines (universaldependencies.org/format.html).

    Comments are no words, nor are the surface forms of several words (3-4), of which each comes on
    its own line, nor words that the text leaves out (8.1).
    """
    column = _UPOS + (config.tag == "xpos")

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
                f"{where}: word {cells[1]!r} has no {config.tag}; tag it, or set data.tag to other "
                "tags that the file has"
            )
        return cells[1], cells[column]

    return word
