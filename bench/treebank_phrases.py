"""Labeled phrases of the Stanford Sentiment Treebank, as training data for `sst2:bag`.

    python -m bench.treebank_phrases trees/train.txt phrases.tsv \
        --held-out trees/dev.txt trees/test.txt

The treebank (Socher et al. 2013) has a label for every phrase of its sentences: 0 and 1 are
negative, 2 is neutral, 3 and 4 are positive. Models are usually trained on all phrases of the
training sentences that are not neutral and tested on whole sentences (Kim 2014, section 3); GLUE's
SST-2 is that file too. `trees/train.txt` has a tree a line, `(3 (2 It) (4 (2 works) (2 .)))`.

Sentences of --held-out, files of trees or of sentences, are left out with all their phrases: some
copies of the treebank have the validation sentences among those for training. Texts are written as
in the files of sentences: in lower case, with spaces for hyphens and without the hyphens of -LRB-.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import tyro

from train.errors import UserError

NEUTRAL = 2

# A word with its label, the label of a longer phrase that begins, or the end of one.
TOKEN = re.compile(r"\((\d) ([^()]+)\)|\((\d)\s+|(\))")


def phrases(tree: str) -> list[tuple[str, int]]:
    """Return the phrases of a tree and their labels, 0 to 4; the whole sentence is the last."""
    found: list[tuple[str, int]] = []
    open_phrases: list[tuple[int, list[str]]] = []
    for match in TOKEN.finditer(tree):
        word_label, word, label, _ = match.groups()
        if label is not None:
            open_phrases.append((int(label), []))
            continue
        if word is not None:
            text, number = word, int(word_label)
        else:
            if not open_phrases:
                raise ValueError("has a bracket too many")
            number, words = open_phrases.pop()
            text = " ".join(words)
        found.append((text, number))
        if open_phrases:
            open_phrases[-1][1].append(text)
    if open_phrases or not found:
        raise ValueError("is no tree, or ends within one")
    return found


def as_in_sentences(text: str) -> str:
    """Return a text as the files of sentences have it."""
    text = text.lower().replace("\\/", "/").replace("\\*", "*")
    text = re.sub("-(lrb|rrb)-", r"\1", text)
    return " ".join(re.sub(r"(?<=\w)-(?=\w)", " ", text).split())


def letters(text: str) -> str:
    """Return what is compared of two texts: files differ in spaces, punctuation and accents."""
    return re.sub("[^a-z0-9]|lrb|rrb", "", as_in_sentences(text))


def labeled_phrases(
    trees: Iterable[str], held_out: Iterable[str] = ()
) -> Iterator[tuple[str, int]]:
    """Yield distinct phrases and their labels, 0 or 1, of sentences that are not held out.

    Raises:
      ValueError: A line is not a tree; the message has its number.
    """
    left_out, seen = {letters(text) for text in held_out}, set()
    for number, tree in enumerate(trees, start=1):
        try:
            found = phrases(tree)
        except ValueError as error:
            raise ValueError(f"line {number} {error}") from None
        if letters(found[-1][0]) in left_out:
            continue
        for text, label in found:
            phrase = as_in_sentences(text), int(label > NEUTRAL)
            if label != NEUTRAL and letters(text) not in left_out and phrase not in seen:
                seen.add(phrase)
                yield phrase


def read_sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a file of trees, or of texts, each before a tab."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield phrases(line)[-1][0] if TOKEN.match(line) else line.split("\t")[0]
        except ValueError as error:
            raise UserError(f"{path}: line {number} {error}; give whole trees or texts") from None


def main(
    trees: Annotated[Path, tyro.conf.Positional],
    output: Annotated[Path, tyro.conf.Positional],
    held_out: tuple[Path, ...] = (),
) -> None:
    """Write the phrases of TREES to OUTPUT, a text and its label a line, with a tab between.

    Args:
      trees: Trees of the training sentences, one a line.
      output: File to write.
      held_out: Files of trees, or of sentences, a text a line before a tab: none of the phrases of
        these sentences is written.
    """
    lines = trees.read_text(encoding="utf-8").splitlines()
    sentences = [text for path in held_out for text in read_sentences(path)]
    try:
        rows = [f"{text}\t{label}\n" for text, label in labeled_phrases(lines, sentences)]
    except ValueError as error:
        remedy = "give a file with a tree a line, such as (3 (2 It) (3 works))"
        raise UserError(f"{trees}: {error}; {remedy}") from None
    output.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows):,} phrases of {len(lines):,} trees: {output}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
